# From a fresh clone: `make tiny` trains a small sweep and draws its figures, `make test` runs the tests.
# Another Python: make test PYTHON=python3.12 VENV=.venv-3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORE ?= results-tiny
FIGURES ?= figures/scaling-tiny

.PHONY: help tiny test test-slow test-ray test-all lint docs lock clean

help:  ## Lists the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

tiny: $(VENV)/.installed  ## A small sweep of every kind of trial on the CPU, through Ray Tune, and its figures
	$(BIN)/python -m sweeps run sweeps/scaling.yaml --tiny --results $(STORE) --yes
	$(BIN)/python analysis/scaling.py $(STORE) --out $(FIGURES)

test: $(VENV)/.installed-dev  ## The quick tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/.installed-dev  ## The slow tests
	$(BIN)/python -m pytest -m 'slow and not ray' -n 2 --dist worksteal --timeout 1800 --durations 15

test-ray: $(VENV)/.installed-dev  ## The tests that start Ray, one after another: each takes all cores
	$(BIN)/python -m pytest -m ray --timeout 1800 --durations 15

test-all: test test-slow test-ray  ## All tests

lint: $(VENV)/.installed-dev  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs  ## The documentation, with a page for each module; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "open build/docs/index.html"

lock: $(VENV)/.installed-dev  ## Resolves the pinned requirements anew, for Python 3.11 to 3.13
	$(BIN)/python -m pip install --quiet uv
	# The largest set first: what the tests need may hold back what everybody gets, never the other way round.
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --fork-strategy fewest --upgrade \
	  --no-header --no-annotate --no-emit-index-url --quiet -o requirements/dev.txt
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --fork-strategy fewest --upgrade \
	  --no-header --no-annotate --no-emit-index-url --quiet -c requirements/dev.txt -o requirements/base.txt
	$(BIN)/uv pip compile pyproject.toml --extra docs --universal --python-version 3.11 --fork-strategy fewest --upgrade \
	  --no-header --no-annotate --no-emit-index-url --quiet -c requirements/dev.txt -o requirements/docs.txt

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "hyla needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1). Use: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python requirements/base.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/base.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed requirements/docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $@

clean:  ## Removes the environment and caches, never results
	rm -rf .venv .venv-3.1? .pytest_cache .ruff_cache .mypy_cache .hypothesis
