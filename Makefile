# Everything a person or the CI runs. Needs on a fresh Debian 12: python3-venv g++ cmake make git.
PYTHON ?= python3
BIN    := .venv/bin

.PHONY: demo test check venv build tools clean

demo: venv
	$(BIN)/evoke-proxy demo

venv: .venv/stamp

# Redone only when pyproject.toml changes; the checkout itself is installed editable.
.venv/stamp: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
