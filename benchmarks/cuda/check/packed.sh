# Runs the check where there is no network: sh benchmarks/cuda/check/packed.sh [arguments of the check]
# make gpu-pack gathers .whl/ and .gpu-check/. SITE: where wheels go.
cd "$(dirname "$0")/../../.." || exit
SITE=${SITE:-/tmp/gpu-check-site}
export TRITON_CACHE_DIR=/tmp/gpu-check-triton PYTHONPATH="$SITE:$PWD/src:$PWD"
if [ -d .whl ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl || exit
fi
if [ -f .gpu-check/triton.tar.xz ]; then
    mkdir -p "$TRITON_CACHE_DIR" && tar xJf .gpu-check/triton.tar.xz -C "$TRITON_CACHE_DIR"
fi
nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm --format=csv,noheader
exec python3 -m benchmarks.cuda.check "$@"
