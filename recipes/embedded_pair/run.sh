#!/usr/bin/env bash
# Makes the embedded pair from nothing: bash recipes/embedded_pair/run.sh OUT
# OUT keeps tokens, checkpoints and logs; a run that was stopped goes on when it is given again.
set -euo pipefail
out=${1:?usage: run.sh OUT}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}

"$python" "$here/corpus.py" --out "$out"
if [ ! -f "$out/target/model/model.safetensors" ]; then
    "$python" "$here/train_target.py" --data "$out" --out "$out/target"
fi
if [ ! -f "$out/drafter/model/model.safetensors" ]; then
    "$python" "$here/distill_drafter.py" --data "$out" --target "$out/target/model" \
        --out "$out/drafter"
fi
"$python" "$here/measure_acceptance.py" --data "$out" --target "$out/target/model" \
    --drafter "$out/drafter/model" > "$out/acceptance.new"
mv "$out/acceptance.new" "$out/acceptance.json"
"$python" "$here/export.py" --data "$out" --out "$root/src/outdraft/assets"
