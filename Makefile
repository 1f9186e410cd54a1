# All targets for people and the CI. Requires on a new Debian 12:
#   apt-get install -y python3-venv g++ cmake make git
PYTHON ?= python3
BIN    := .venv/bin
TESTS  ?= tests
# Test files that run in parallel: one more than cores, because a test uses about two thirds of one.
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 4)))

# Installs the checkout, editable, with EXTRAS. uv takes a quarter of pip's time, but does not read
# pip's settings: where it cannot install, pip does, and says why if it cannot either.
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV       = $(PIP) 'uv>=0.5' && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
INSTALL  = { $(UV) -e '.[$(EXTRAS)]' 2>/dev/null || $(PIP) -e '.[$(EXTRAS)]'; }

ARGS   ?=
PIN    := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header

BENCHES := support latency copies limit overhead stall placement quality evidence tasks coding traces session restart soak growth agent

.PHONY: demo proof test check docs bench fuzz fuzz-parsers isolation patches-check test-matrix help venv build release requirements tools clean

##@ Start
## make demo            a planted fact under four policies; report in out/demo/report.html
## make build           the patched llama-server and the stock one
## make proof           ten minutes that check the main claims here: SEED=271828 MODEL=own.gguf
demo: venv
	@$(BIN)/evoke-proxy demo

# Draws a seed where none is given. Writes out/proof/proof.html.
proof: build
	@$(BIN)/python -m bench.proof $(if $(SEED),--seed $(SEED)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

##@ Check
## make test            all tests; TESTS=tests/unit for some of them
## make check           style, types, structure
## make test-matrix TARGET=avx2   the contract tests on another build: avx2, tsan, vulkan, rpc, macos, pins
## make fuzz            20000 random operations and malformed requests, with sanitizers
## make fuzz-parsers    each parser of the proxy on inputs that atheris changes; ARGS='--seconds 300'
## make isolation       100000 interleavings of the requests of two tenants
## make patches-check   releases of llama.cpp that the patches apply to: patches/APPLIES.md
## make docs            the documentation as a site, in out/site
# Byte code is kept: each worker reads all test files, and many tests start the proxy as a process.
test: export PYTHONDONTWRITEBYTECODE =
test: build .venv/clients
	@$(BIN)/python tests/run.py -n $(JOBS) --dist loadfile --no-loadscope-reorder --continue-on-collection-errors $(TESTS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy --strict evoke_proxy bench recipes
	$(BIN)/python -m pytest -q tests/unit/house/test_floors.py

##@ Recall: does the model see what the question needs
## make bench-evidence  labelled evidence in real conversations: is it in the cache, by budget
## make bench-tasks     many values, several hops, pronouns, inference: are all needed messages in the cache
## make bench-coding    what a coding agent repeats in its next message: is it in the cache, by budget
## make bench-quality   recall on a budget, by policy; ARGS=--quick for a minute of it,
##                      ARGS=ceilings for what the model knows, ARGS=unseen, ARGS=hybrid, ARGS=crossover
## make bench-placement recall by position of a recovered block, by distance
##@ Cost: what a turn, a copy and a restart take
## make bench-overhead  time that the proxy adds to a request and to a budgeted turn
## make bench-session   time that a budget costs: a long conversation, and sixteen at once
## make bench-growth    time of a turn in the proxy with 100 to 100,000 saved blocks
## make bench-stall     longest stall that one client causes another
## make bench-latency   save, load and evict a block, compared with decoding it
## make bench-copies    save and load, compared with a memcpy of the same size
## make bench-latency-gpu  both on an NVIDIA GPU, compared with the link and with decoding
## make bench-restart   first token after a restart: cold, with the usual recipe, with ours
## make bench-peers     only that recipe and ours
##@ Limits and whole applications
## make bench-limit     longest generation and parallel conversations in few cells; ARGS=shift for what
##                      context shift loses
## make bench-support   memory types and what they support: writes patches/SUPPORT.md
## make bench-traces    recorded agents on few slots: tokens decoded again, compared with llama-server's RAM
##                      cache; ARGS=--quick for a minute of it
## make bench-agent     a coding agent on a budget: decoded and recovered tokens, bit-exact
## make bench-soak      many agents for 10 minutes; ARGS='--seconds 9000 --faults 60' for hours of faults
## make bench           all benches, hours
# All benches in sequence, for hours, on an otherwise idle machine. A bench that misses its bar does not
# stop the others.
bench: build .venv/clients
	@missed=; for name in $(BENCHES); do \
	  echo "== $$name"; $(MAKE) --no-print-directory bench-$$name || missed="$$missed $$name"; done; \
	test -z "$$missed" || { echo "these missed their bars:$$missed" >&2; exit 1; }

# The usual recipe and ours, on the same server in the same run.
bench-peers: venv
	@$(BIN)/python -m bench.restart --arms cold peer ours $(ARGS)

# `gpu` needs nvcc and an NVIDIA GPU, so `make bench` does not include it.
bench-copies: venv
	@$(BIN)/python -m bench.latency memcpy $(ARGS)

bench-latency-gpu: venv
	@$(BIN)/python -m bench.latency gpu $(ARGS)

# Writes a table and out/bench/NAME.json. ARGS='--help' lists the options of a bench.
bench-%: venv
	@$(BIN)/python -m bench.$* $(ARGS)

# Builds servers with sanitizers first, which takes minutes.
fuzz: venv
	@$(BIN)/python tests/fuzz.py $(ARGS)

fuzz-parsers: .venv/clients
	@$(BIN)/python tests/fuzz_parsers.py $(ARGS)

# `make test` runs a tenth of them.
isolation: venv
	@EVOKE_INTERLEAVINGS=100000 $(BIN)/python -m pytest -q --timeout 3600 tests/unit/engine/server/test_conversations_interleaved.py

# Writes patches/APPLIES.md. Downloads 350 MB, compiles two releases and the files of the pin that each
# patch changes; the next run reuses the objects.
patches-check: venv
	@$(BIN)/python patches/check.py $(ARGS)

# Servers that the CI has no time to build. `ARGS` names tests instead of the target's own.
test-matrix: venv .venv/clients
	@test -n "$(TARGET)" || { $(BIN)/python tests/matrix.py --help; exit 2; }
	@$(BIN)/python tests/matrix.py $(TARGET) $(ARGS)

# Prints the lines of this file that begin with `##`.
help:
	@sed -n 's/^##@ \(.*\)/\n\1/p; s/^## /  /p' Makefile

# Both servers from one build tree: minutes the first time, immediate later. The patched one is first,
# because `make demo` leaves the tree patched: only its web UI is compiled then. Its libraries are kept
# for tests before the stock server replaces them.
build: venv
	@$(BIN)/python -m evoke_proxy.server_build
	@PYTHONPATH=. $(BIN)/python tests/contract/native_libraries.py
	@$(BIN)/python -m evoke_proxy.server_build --stock

venv: .venv/stamp

# Installed once per change of pyproject.toml; the checkout is installed editable.
.venv/stamp: private EXTRAS = dev
.venv/stamp: pyproject.toml | tools
	$(PYTHON) -m venv .venv
	@echo "installing evoke-proxy[$(EXTRAS)] into .venv"
	@$(INSTALL)
	@touch $@

# Large packages that only tests and some benches need: client libraries for tests/clients, packages
# that run and write an embedder, and linters of docker/.
.venv/clients: private EXTRAS = dev,clients,cpu,docker,export,fuzz,otel
.venv/clients: .venv/stamp
	@echo "installing evoke-proxy[$(EXTRAS)] into .venv"
	@$(INSTALL)
	@touch $@

# The documentation as a site in out/site. Broken links are errors.
docs: venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo "written: out/site/index.html"

release: venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,release]'
	@$(BIN)/python release/make.py $(ARGS)

requirements: venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[release]'
	@for extra in cpu gpu; do $(PIN) --extra $$extra --extra encryption --extra otel \
	  -o release/requirements/$$extra.txt pyproject.toml || exit 1; done
	@echo 'hatchling>=1.24' | $(PIN) -o release/requirements/build.txt -

# Reports missing programs before a long build, and how to install them.
tools:
	@missing=; \
	for pair in git:git cmake:cmake g++:g++; do \
	  command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair##*:}"; done; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then \
	  echo "missing on this machine:$$missing" >&2; \
	  echo "on Debian or Ubuntu:  sudo apt-get install -y$$missing" >&2; exit 1; fi

##@ Release: nothing is published
## make release         wheel, sdist, SBOM and licences in dist/, tested in an empty environment;
##                      ARGS=--server also compiles and packs llama-server for x86-64,
##                      ARGS=--unreleased packs changes that no version has yet
## make requirements    pins all dependencies of the images with hashes: release/requirements
##@ Tidy
## make clean           delete everything but the built servers
# Keeps the built servers in the cache (~/.cache/evoke-proxy), which took minutes.
clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
