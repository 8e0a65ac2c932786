#!/bin/sh
# Makes everything that run.py needs: an environment for each engine with pinned versions, llama.cpp
# built for this machine, the pair `big`, and every model in every engine's own format.
#
#   benchmarks/peers/prepare.sh FOLDER
#
# PYTHON is one that has outdraft, JOBS how many compilers run at once. What is there already stays.
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/envs" "$1/models" "$1/src"
FOLDER=$(cd "$1" && pwd)
PYTHON=${PYTHON:-$(cd "$HERE/../.." && pwd)/.venv/bin/python}
JOBS=${JOBS:-1}
LLAMA=llama_cpp_python-0.3.36
SOURCES=$FOLDER/src/$LLAMA/vendor/llama.cpp
ENVS=$FOLDER/envs
MODELS=$FOLDER/models

# The Python binding's sources hold those of llama.cpp. The server needs its multimodal part only
# to link, so that is compiled quickly.
if [ ! -x "$ENVS/llama.cpp/bin/llama-server" ]; then
    cd "$FOLDER/src"
    [ -f $LLAMA.tar.gz ] || "$PYTHON" -m pip download --no-deps --no-binary :all: \
        llama-cpp-python==0.3.36
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
fi

# torch goes first: whichever build the machine's pip prefers (CPU or CUDA) then stays. The lists
# are complete but for torchvision and its like, which no engine needs for text.
for ENGINE in transformers openvino vllm; do
    [ ! -d "$ENVS/$ENGINE" ] || continue
    python3 -m venv "$ENVS/$ENGINE"
    "$ENVS/$ENGINE/bin/pip" install torch==2.13.0
    "$ENVS/$ENGINE/bin/pip" install --no-deps -r "$HERE/requirements/$ENGINE.txt"
done
# vLLM's manual advises tcmalloc; without it the engine runs too.
if [ ! -e "$ENVS/vllm/lib/libtcmalloc_minimal.so" ] && command -v apt-get > /dev/null; then
    (cd "$FOLDER/src" && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-*.deb . &&
        cp -L usr/lib/*/libtcmalloc_minimal.so.4 "$ENVS/vllm/lib/libtcmalloc_minimal.so") || true
fi

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
