#!/usr/bin/env bash
# Trains one draft head of the embedded target and puts it beside the pair, in the package's data:
# bash recipes/draft_heads/run.sh OUT eagle3|medusa|mlp_speculator|dflash|dspark
# OUT is the folder of recipes/embedded_pair/run.sh; a run that was stopped goes on when it is
# given again.
set -euo pipefail
out=${1:?usage: run.sh OUT eagle3|medusa|mlp_speculator|dflash|dspark}
head=${2:?usage: run.sh OUT eagle3|medusa|mlp_speculator|dflash|dspark}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH=$root/recipes/embedded_pair

case $head in
    eagle3) flags=(--steps 540 --decay-steps 220 --short-steps 300) ;;
    medusa) flags=(--steps 600 --decay-steps 400 --matrix-lr 0.03 --vocabulary-lr 3e-3) ;;
    mlp_speculator) flags=(--steps 560 --decay-steps 320 --short-steps 240 --vocabulary-lr 3e-3) ;;
    dflash) flags=(--parts 9 --steps 940 --decay-steps 400) ;;
    dspark) # goes on from the DFlash head
        flags=(--parts 9 --init "$out/heads/dflash/model" --steps 240 --decay-steps 200)
        flags+=(--matrix-lr 0.01 --vocabulary-lr 4e-3) ;;
    *) echo "no such head: $head" >&2; exit 2 ;;
esac

if [ ! -f "$out/heads/$head/model/model.safetensors" ]; then
    "$python" "$here/train.py" "$head" --data "$out" --out "$out/heads/$head" "${flags[@]}"
fi
"$python" "$here/measure_acceptance.py" "$head" --data "$out" --model "$out/heads/$head/model" \
    --texts "$out/heads/judged_texts.json" > "$out/heads/$head/acceptance.new"
mv "$out/heads/$head/acceptance.new" "$out/heads/$head/acceptance.json"
"$python" "$here/export.py" --data "$out/heads" --out "$root/src/outdraft/assets"
