# `make help` lists the commands.
VENV   ?= .venv
PYTHON ?= python3

PY := $(VENV)/bin/python
# Tests and checks run offline, one thread per process.
# Bytecode is kept, whatever the shell says: tests start many processes, each of which would compile every module again.
OFFLINE := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline
# What DeepSpeed compiles at first use; a folder of our own, so that a killed build elsewhere cannot block us.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

.DEFAULT_GOAL := help
.PHONY: help install only-ours demo test slow gpu checks notebooks docs figures clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/.installed ## a virtual environment in .venv with everything (VENV=DIR, PYTHON=python3.12 to choose)

# An environment holds one checkout: with the one of another, tests would run that code, or installing would take it away from there.
only-ours:
	@other=$$(sed -n 's|.*"url": *"file://\([^"]*\)".*|\1|p' $(VENV)/lib/python*/site-packages/headstart-*.dist-info/direct_url.json 2>/dev/null); \
	test ! -d "$$other" || test "$$other" -ef . || { echo "error: $(VENV) is the environment of $$other: choose another one (VENV=DIR)"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | only-ours
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	@touch $@

demo: install ## train, export, decode with and report on a drafter for the shipped target (some minutes: README.md)
	$(PY) train.py

test: install ## the tests, but for the slow ones
	$(OFFLINE) $(PY) -m pytest -q -n 2 --dist worksteal

slow: install ## the slow tests: processes of their own, whole runs, long lists of the same
	$(OFFLINE) $(PY) -m pytest -q -n 2 --dist worksteal -o timeout=900 -m slow

gpu: ## what only a GPU can show (5 minutes at most; PYTHON needs torch, transformers, accelerate, pytest, and nothing is installed)
	$(OFFLINE) $(PYTHON) -m pytest -q -ra -o addopts= -m gpu tests/test_gpu.py tests/test_gpu_drafters.py tests/heads/test_flash.py

# mypy follows no import hook of an editable installation: the package as it will be installed, for its eyes.
TYPES := build/types/headstart
$(TYPES):
	mkdir -p $@
	for folder in heads inference data trainers door; do ln -sfn ../../../$$folder $@/$$folder; done

checks: install $(TYPES) ## style, types, import directions
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

notebooks: install ## execute the notebooks
	$(OFFLINE) $(PY) -m pytest -q -n 2 -o timeout=2400 --nbmake --nbmake-timeout=1800 notebooks

docs: install $(TYPES) ## the documentation as pages, build/docs/index.html
	$(PY) docs/pictures.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

figures: install ## README's table of all drafters, from one run (about an hour and a half)
	$(PY) benchmarks/drafters.py

clean: ## remove what tools and builds left (runs/ and the virtual environment stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
