# make serve   install into .venv, then serve the bundled model on http://127.0.0.1:8000
# make test    install into .venv, then run the tests
# make test-all  also those marked slow: every fault in every state, every Kubernetes overlay
# make check   lint, format and types
# make test-gpu, make bench-gpu  on a machine with a GPU; they install nothing (docs/gpu.md)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: serve test test-all test-gpu bench-gpu check install clean

serve: $(INSTALLED)
	$(BIN)/manta serve serve_config.yaml

# two processes, since half of the time of a test is waiting for others to start; a file's fixtures stay together, and
# what takes longest comes first (tests/conftest.py)
TEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(TEST)

# in another order every time; `make test-all TEST_SEED=...` repeats one
test-all: TEST_SEED ?= $(shell date +%s)
test-all: $(INSTALLED)
	@echo "TEST_SEED=$(TEST_SEED)"
	TEST_SEED=$(TEST_SEED) $(TEST) -m ''

# With the environment of `make install` where there is one, else with the machine's own Python, as in a CUDA image
# without a network: neither Ray nor anything else of Serve is needed.
GPU_PYTHON ?= $(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON))
GPU_TESTS := tests/gpu tests/engine/model/ops/gpu
GPU_OUT ?= build/gpu

test-gpu:
	$(GPU_PYTHON) -m tests.gpu.requirements
	$(GPU_PYTHON) -m pytest $(GPU_TESTS) -o timeout_method=thread -rs $(PYTEST_ARGS)

bench-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(BENCH_ARGS)

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
	rm -rf build $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
