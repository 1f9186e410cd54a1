# docker buildx bake -f docker/docker-bake.hcl            both images for CPUs
# docker buildx bake -f docker/docker-bake.hcl cuda       both images for NVIDIA GPUs
# The arguments are those of compose.yaml and compose.cpu.yaml (tests/unit/deploy/test_bake.py).

variable "REGISTRY" {
  default = "evoke-proxy"
}

variable "VERSION" {
  default = "0.3.2"
}

# The GPUs to compile for; all that llama.cpp supports takes hours.
variable "CUDAARCHS" {
  default = "75-real;80-real;86-real;89-real;90;120a-real"
}

group "default" {
  targets = ["proxy-cpu", "llama-server-cpu"]
}

group "cuda" {
  targets = ["proxy-gpu", "llama-server-cuda"]
}

target "common" {
  context = "."
  labels = {
    "org.opencontainers.image.title"    = "evoke-proxy"
    "org.opencontainers.image.version"  = VERSION
    "org.opencontainers.image.licenses" = "Apache-2.0 AND MIT"
  }
  attest = ["type=provenance,mode=max", "type=sbom"]
}

target "proxy-cpu" {
  inherits   = ["common"]
  dockerfile = "docker/proxy.Dockerfile"
  target     = "proxy"
  platforms  = ["linux/amd64"]
  args = {
    BASE_IMAGE = "debian:12-slim"
    EXTRA      = "cpu"
  }
  tags = ["${REGISTRY}/proxy:${VERSION}-cpu"]
}

target "proxy-gpu" {
  inherits   = ["common"]
  dockerfile = "docker/proxy.Dockerfile"
  target     = "proxy"
  platforms  = ["linux/amd64"]
  args = {
    BASE_IMAGE = "nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04"
    EXTRA      = "gpu"
  }
  tags = ["${REGISTRY}/proxy:${VERSION}-gpu"]
}

target "llama-server-cpu" {
  inherits   = ["common"]
  dockerfile = "docker/llama-server.Dockerfile"
  platforms  = ["linux/amd64"]
  args = {
    BUILD_IMAGE = "debian:12-slim"
    RUN_IMAGE   = "debian:12-slim"
    CUDA        = ""
  }
  tags = ["${REGISTRY}/llama-server:${VERSION}-cpu"]
}

target "llama-server-cuda" {
  inherits   = ["common"]
  dockerfile = "docker/llama-server.Dockerfile"
  platforms  = ["linux/amd64"]
  args = {
    BUILD_IMAGE = "nvidia/cuda:13.0.1-devel-ubuntu24.04"
    RUN_IMAGE   = "nvidia/cuda:13.0.1-runtime-ubuntu24.04"
    CUDA        = "1"
    CUDAARCHS   = CUDAARCHS
  }
  tags = ["${REGISTRY}/llama-server:${VERSION}-cuda"]
}
