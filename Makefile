# Everything a person or the CI runs. Needs on a fresh Debian 12:
#   apt-get install -y python3-venv g++ cmake make git
PYTHON ?= python3
BIN    := .venv/bin
TESTS  ?= tests
# Test files that run at once; the servers they start use one core each.
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))

ARGS   ?=

BENCHES := support latency copies capture decode limit overhead stall embedding retrieval ceiling ruler fact_kinds kv_types placement demo_seeds quality evidence session restart soak growth agent long opencode

.PHONY: demo test check bench fuzz patches-check test-matrix help venv build tools clean

demo: venv
	@$(BIN)/evoke-proxy demo

test: build .venv/clients
	@$(BIN)/python tests/run.py -n $(JOBS) --dist loadfile --continue-on-collection-errors $(TESTS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy --strict evoke_proxy bench
	$(BIN)/python -m pytest -q tests/unit/test_floors.py

# All of them, one after the other, hours: on a machine that does nothing else. A bench that misses
# what it is held to does not keep the others from running.
bench: build .venv/clients
	@missed=; for name in $(BENCHES); do \
	  echo "== $$name"; $(BIN)/python -m bench.$$name || missed="$$missed $$name"; done; \
	test -z "$$missed" || { echo "missed what they are held to:$$missed" >&2; exit 1; }

bench-embedding bench-quality bench-retrieval: .venv/clients

# The recipe that others use beside ours, on the same server in the same run.
bench-peers: venv
	@$(BIN)/python -m bench.restart --arms cold peer ours $(ARGS)

# Builds with CUDA: needs nvcc and an NVIDIA GPU, so `make bench` leaves it out.
bench-latency-gpu: venv
	@$(BIN)/python -m bench.latency_gpu $(ARGS)

# What it writes: a table, and out/bench/NAME.json. ARGS='--help' says what a bench can be told.
bench-%: venv
	@$(BIN)/python -m bench.$* $(ARGS)

# Servers with sanitizers, built first: minutes.
fuzz: venv
	@$(BIN)/python tests/fuzz.py $(ARGS)

# Where the series applies: writes patches/APPLIES.md. Downloads 350 MB, compiles two releases and what
# each patch touches of the pin; what was built is there for the next run.
patches-check: venv
	@$(BIN)/python patches/check.py $(ARGS)

# Servers that the CI has no time to build; `ARGS` names tests, instead of those of the target.
test-matrix: venv .venv/clients
	@test -n "$(TARGET)" || { $(BIN)/python tests/matrix.py --help; exit 2; }
	@$(BIN)/python tests/matrix.py $(TARGET) $(ARGS)

help:
	@echo "make demo            a planted fact, four policies, pictures in out/demo/report.html"
	@echo "make test            everything; TESTS=tests/unit for some of it"
	@echo "make test-matrix TARGET=avx2   the contract tests on another build: avx2, tsan, vulkan, rpc, pins"
	@echo "make check           style, types, the plan of the house"
	@echo "make build           the patched llama-server and the stock one"
	@echo "make bench-latency   save, load, evict a block, against decoding it again"
	@echo "make bench-capture   what capturing attention adds to a generated token"
	@echo "make bench-decode    decode speed of the patched server against the stock one"
	@echo "make bench-limit     how long a generation gets in few cells, how many get on at once"
	@echo "make bench-copies    save and load against a memcpy of as many bytes"
	@echo "make bench-latency-gpu  the two on an NVIDIA GPU, against the link and decoding again"
	@echo "make bench-overhead  what the proxy adds to a request and to a budgeted turn"
	@echo "make bench-stall     the longest stall that one client causes another"
	@echo "make bench-embedding what a vector of a question or of a block costs"
	@echo "make bench-retrieval how often the block with the answer is found, and how fast"
	@echo "make bench-ceiling   how often the bundled model recalls when nothing is evicted"
	@echo "make bench-kv_types  how often it recalls with a KV cache of fewer bits"
	@echo "make bench-placement recall by where a recovered block lands, by distance"
	@echo "make bench-support   which memories can do what: writes patches/SUPPORT.md"
	@echo "make bench-quality   recall on a budget, by policy; ARGS=--quick for a minute of it"
	@echo "make bench-evidence  labelled evidence in real conversations: is it in the cache, by budget"
	@echo "make bench-recall    which layers of a model find the block that is asked for, and by what"
	@echo "make bench-session   the time a budget costs: a long conversation, and sixteen at once"
	@echo "make bench-growth    what a turn costs the proxy with 100 to 100,000 saved blocks"
	@echo "make bench-agent     a coding agent on a budget: what is decoded, what comes back, to the bit"
	@echo "make bench-opencode  opencode itself on a budget, against an intact prefix cache"
	@echo "make bench-long      a session eight times its budget: recall along it, rows in the cache"
	@echo "make bench-restart   the first token after a restart: cold, by the usual recipe, by ours"
	@echo "make bench-peers     that recipe and ours alone"
	@echo "make bench-soak      many agents for 10 minutes; ARGS='--seconds 36000' for longer"
	@echo "make bench           all benches, hours"
	@echo "make fuzz            random operations and nonsense, 20000, under sanitizers"
	@echo "make patches-check   which releases of llama.cpp take the patches: patches/APPLIES.md"
	@echo "make clean           all but the built servers"

# Both servers, from one build tree: minutes the first time, nothing after that.
build: venv
	@$(BIN)/python -m evoke_proxy.server_build --stock
	@$(BIN)/python -m evoke_proxy.server_build

venv: .venv/stamp

# Redone only when pyproject.toml changes; the checkout itself is installed editable.
.venv/stamp: pyproject.toml | tools
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# What only tests and some benches need: the client libraries that tests/clients lets talk to the
# proxy, which are large, what runs and writes an embedder, and what reads docker/.
.venv/clients: .venv/stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,clients,cpu,docker,export]'
	@touch $@

# Says what is missing before minutes are spent, and how to get it.
tools:
	@missing=; \
	for pair in git:git cmake:cmake g++:g++; do \
	  command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair##*:}"; done; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then \
	  echo "missing on this machine:$$missing" >&2; \
	  echo "on Debian or Ubuntu:  sudo apt-get install -y$$missing" >&2; exit 1; fi

# The built servers stay in the cache (~/.cache/evoke-proxy): they took minutes.
clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
