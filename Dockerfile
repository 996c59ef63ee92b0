# One image, two variants: --build-arg VARIANT=cuda (the default; runs on CPU too) or VARIANT=cpu (much smaller).
# Another base: --build-arg BASE=… (anything with apt, or with python3 >= 3.11, its venv module and gcc already there).
# Another source of torch: --build-arg TORCH_INDEX=… For --engine ray: --build-arg EXTRAS=ray
ARG BASE=debian:bookworm-slim

# The wheel, with CPU kernels for every level of processors. Its compiler stays here.
FROM ${BASE} AS wheel
RUN set -eu; \
    if ! python3 -c 'import ensurepip, venv' || ! gcc --version; then \
      apt-get update; \
      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-venv ca-certificates gcc libc6-dev; \
      rm -rf /var/lib/apt/lists/*; \
    fi; \
    python3 -m venv /opt/build
COPY . /source
RUN /opt/build/bin/python -m pip --disable-pip-version-check wheel --no-cache-dir --no-deps --wheel-dir /wheel /source

FROM ${BASE}
ARG VARIANT=cuda
ARG TORCH_INDEX=
ARG EXTRAS=

# On CUDA, Triton compiles a launcher for each of its kernels.
RUN set -eu; \
    case "$VARIANT" in cuda) more="gcc libc6-dev python3-dev" ;; cpu) more="" ;; \
      *) echo "VARIANT must be cuda or cpu, not $VARIANT" >&2; exit 1 ;; esac; \
    if [ -n "$more" ] || ! python3 -c 'import ensurepip, venv'; then \
      apt-get update; \
      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-venv ca-certificates $more; \
      rm -rf /var/lib/apt/lists/*; \
    fi; \
    python3 -m venv /opt/lorikeet; \
    mkdir -p /data; chown 1000:0 /data; chmod 0775 /data

# Dependencies are a layer of their own: a change of the source downloads nothing. pip compiles their bytecode.
# torch goes first: its index decides about it alone. The CUDA build brings its libraries along.
COPY pyproject.toml constraints.txt /tmp/source/
RUN set -eu; cd /tmp/source; \
    if [ -z "$TORCH_INDEX" ] && [ "$VARIANT" = cpu ]; then TORCH_INDEX=https://download.pytorch.org/whl/cpu; fi; \
    if [ "$TORCH_INDEX" = none ]; then TORCH_INDEX=; fi; \
    python="/opt/lorikeet/bin/python"; \
    pip="$python -m pip --disable-pip-version-check install --no-cache-dir --constraint constraints.txt"; \
    $python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [project['optional-dependencies'][name] for name in sys.argv[1].split(',') if name]; \
print(*project['dependencies'], *sum(extras, []), sep='\n')" "$EXTRAS" > requirements.txt; \
    $pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch; \
    $pip -r requirements.txt; \
    rm -rf /tmp/source

COPY --from=wheel /wheel /tmp/wheel
RUN set -eu; \
    /opt/lorikeet/bin/python -m pip --disable-pip-version-check install --no-cache-dir --no-deps /tmp/wheel/*.whl; \
    rm -rf /tmp/wheel; \
    /opt/lorikeet/bin/lorikeet-launcher --version

# HOME and USER: some libraries ask for them, and an image run with --user may have neither.
# Whatever is compiled or downloaded at run time is kept in the volume.
ENV PATH=/opt/lorikeet/bin:$PATH \
    HOME=/tmp \
    USER=lorikeet \
    PORT=80 \
    JSON_OUTPUT=true \
    HUGGINGFACE_HUB_CACHE=/data \
    XDG_CACHE_HOME=/data/cache \
    TRITON_CACHE_DIR=/data/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/data/cache/inductor \
    CUDA_CACHE_PATH=/data/cache/cuda

LABEL org.opencontainers.image.title="Lorikeet" \
      org.opencontainers.image.description="One base language model with thousands of LoRA adapters over HTTP" \
      org.opencontainers.image.source="https://github.com/lorikeet-serve/lorikeet" \
      org.opencontainers.image.documentation="https://github.com/lorikeet-serve/lorikeet/blob/main/docs/README.md" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY deploy/entrypoint.sh /usr/local/bin/entrypoint.sh
EXPOSE 80
# Running requests finish first: stop it with `docker stop -t 90`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m \
  CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health', timeout=8)"]
# It starts as root only to make /data writable, then runs as uid 1000.
ENTRYPOINT ["entrypoint.sh"]
