# One image, two variants: --build-arg VARIANT=cuda (the default; runs on CPU too) or VARIANT=cpu (much smaller).
# Another base: --build-arg BASE=… (anything with apt, or with python3 >= 3.11 and its venv module already there).
# Another source of torch: --build-arg TORCH_INDEX=… For --engine ray: --build-arg EXTRAS=ray
ARG BASE=debian:bookworm-slim
FROM ${BASE}

ARG VARIANT=cuda
ARG TORCH_INDEX=
ARG EXTRAS=

# The compiler makes kernels for the processor, or the CUDA device, that the image later runs on.
RUN set -eu; \
    case "$VARIANT" in cuda) more="python3-dev" ;; cpu) more="" ;; \
      *) echo "VARIANT must be cuda or cpu, not $VARIANT" >&2; exit 1 ;; esac; \
    if [ -n "$more" ] || ! python3 -c 'import ensurepip, venv' || ! gcc --version; then \
      apt-get update; \
      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-venv ca-certificates gcc libc6-dev $more; \
      rm -rf /var/lib/apt/lists/*; \
    fi; \
    python3 -m venv /opt/lorikeet

COPY . /tmp/source

# torch goes first: its index decides about it alone. The CUDA build brings its libraries along.
RUN set -eu; cd /tmp/source; \
    if [ -z "$TORCH_INDEX" ] && [ "$VARIANT" = cpu ]; then TORCH_INDEX=https://download.pytorch.org/whl/cpu; fi; \
    if [ "$TORCH_INDEX" = none ]; then TORCH_INDEX=; fi; \
    torch=$(sed -n 's/^ *"\(torch[<>=!~].*\)",/\1/p' pyproject.toml); \
    pip="/opt/lorikeet/bin/python -m pip --disable-pip-version-check install --no-cache-dir --no-compile"; \
    $pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"; \
    $pip ".${EXTRAS:+[$EXTRAS]}"; \
    rm -rf /tmp/source; \
    mkdir -p /data; chmod 0775 /data; \
    /opt/lorikeet/bin/lorikeet-launcher --version

# HOME and USER: some libraries ask for them, and an image run with --user may have neither.
ENV PATH=/opt/lorikeet/bin:$PATH \
    HOME=/tmp \
    USER=lorikeet \
    PORT=80 \
    HUGGINGFACE_HUB_CACHE=/data

EXPOSE 80
ENTRYPOINT ["lorikeet-launcher"]
CMD ["--json-output"]
