# evoke-proxy, which also downloads the text encoder. Build context: the top of the checkout.

# For EXTRA=gpu an image with the CUDA and cuDNN versions that onnxruntime-gpu requires.
ARG BASE_IMAGE=debian:12-slim

FROM ${BASE_IMAGE} AS build
# cpu or gpu. Never both: the two onnxruntime packages overwrite each other's files.
ARG EXTRA=cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml LICENSE README.md* ./
COPY config config
COPY patches patches
COPY evoke_proxy evoke_proxy
COPY release/requirements release/requirements
# Every package is one whose hash is in release/requirements; those to build with stay out of the image.
RUN --mount=type=cache,target=/root/.cache/pip \
    case "$EXTRA" in cpu|gpu) ;; *) echo "EXTRA is cpu or gpu, not '$EXTRA'" >&2; exit 1 ;; esac \
    && python3 -m venv /opt/evoke-proxy \
    && python3 -m venv /opt/build \
    && /opt/build/bin/python -m pip install --disable-pip-version-check \
        --require-hashes -r release/requirements/build.txt \
    && /opt/build/bin/python -m pip wheel --disable-pip-version-check \
        --no-deps --no-build-isolation -w /opt/build/wheels . \
    && /opt/evoke-proxy/bin/python -m pip install --disable-pip-version-check \
        --require-hashes -r "release/requirements/$EXTRA.txt" \
    && /opt/evoke-proxy/bin/python -m pip install --disable-pip-version-check \
        --no-deps /opt/build/wheels/*.whl

FROM ${BASE_IMAGE} AS proxy
# A new volume gets the owner of the directory that it is mounted on.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /nonexistent evoke \
    && install -d -o 10001 -g 10001 /embedder \
    && install -d -m 0700 -o 10001 -g 10001 /slots /state
COPY --from=build /opt/evoke-proxy /opt/evoke-proxy
ENV PATH=/opt/evoke-proxy/bin:$PATH EVOKE_LISTEN=0.0.0.0:8090 EVOKE_EMBEDDER_STORE=/embedder
USER 10001:10001
EXPOSE 8090
ENTRYPOINT ["evoke-proxy"]
CMD ["serve"]
