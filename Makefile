# The two commands of the README, and what else a developer needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Options of pip; `test-floor` names a file of versions.
CONSTRAIN ?=

.PHONY: quickstart test test-floor test-slow lint types format docs benchmark benchmark-short release-check clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m fedjax_bn.main --config configs/quickstart.py

# Another Python: make test PYTHON=python3.12 VENV=.venv312
# A process for each core, but no more than memory bears. Each takes half of
# the files in their order, so that what one test compiled the next one finds.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# The oldest versions together: those of Google Colab, whose Python is 3.13.
test-floor:
	$(MAKE) test VENV=.venv-floor CONSTRAIN="--constraint constraints-floor.txt"

test-slow: $(VENV)/.installed-test
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pages in docs/_build/html; a warning, such as a link that leads nowhere, is an error.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going --quiet docs docs/_build/html

# At most six minutes on two cores. PyTorch is what the benchmarks compare with; nothing else needs it.
benchmark: $(VENV)/.installed-benchmark
	$(BIN)/python benchmarks/round_time.py

# DigitCNN alone, a round and evaluation: at most two minutes on two cores.
benchmark-short: $(VENV)/.installed-benchmark
	$(BIN)/python benchmarks/round_time.py --quick

# What a release passes: the checks above, and the suite on the wheel, installed where nothing else
# is and tested from outside the checkout, whose own package the tests then do not import.
RELEASE := build/release
release-check: lint types docs
	rm -rf $(RELEASE)
	$(BIN)/python -m build --outdir $(RELEASE)/dist
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install --quiet "$$(ls $(RELEASE)/dist/*.whl)[test]"
	cd $(RELEASE) && venv/bin/python -c "import fedjax_bn as f; assert 'site-packages' in f.__file__"
	cd $(RELEASE) && venv/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(CURDIR)/tests

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'fedjax_bn needs Python 3.11 or newer'"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(CONSTRAIN) --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(CONSTRAIN) --editable '.[test]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(CONSTRAIN) --editable '.[dev]'
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(CONSTRAIN) --editable '.[docs]'
	touch $@

$(VENV)/.installed-benchmark: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet torch==2.13.0
	touch $@

clean:
	rm -rf $(VENV) .venv-floor .pytest_cache .ruff_cache .hypothesis build dist docs/_build docs/generated *.egg-info
