# make serve   install into .venv, then serve the bundled model on http://127.0.0.1:8000
# make test    install into .venv, then run the tests
# make test-all  also those marked slow: every fault in every state, every Kubernetes overlay
# make check   lint, format and types

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# On Linux Serve's own HAProxy stands in front, and each ingress replica answers HTTP itself: a streamed token costs a
# fraction of what it costs through Serve's Python proxy (docs/performance.md). Elsewhere that proxy is used.
ifeq ($(shell uname -s),Linux)
serve: export RAY_SERVE_ENABLE_HA_PROXY = 1
serve: export RAY_SERVE_THROUGHPUT_OPTIMIZED = 1
serve: export RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S = 0
endif

.PHONY: serve test test-all check install clean

serve: $(INSTALLED)
	@$(BIN)/manta check serve_config.yaml
	$(BIN)/serve run serve_config.yaml

# two processes, since half of the time of a test is waiting for others to start; a file's fixtures stay together
TEST := $(BIN)/pytest -n 2 --dist loadfile

test: $(INSTALLED)
	$(TEST)

test-all: $(INSTALLED)
	$(TEST) -m ''

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

# runs again only when what is to be installed has changed
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Manta needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
