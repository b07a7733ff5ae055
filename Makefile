# Everything from a bare machine: Python 3.10-3.13, make and a package registry are all that is needed.
# Another Python: make quickstart PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
DIST ?= dist

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pyright looks for a newer release of itself on every run otherwise.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help quickstart install check test build docs clean

help:  ## say what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | awk -F '\t' '{printf "make %-12s %s\n", $$1, $$2}'

quickstart: $(STAMP)  ## fine-tune a small model on this machine, GPU or not, in a few minutes
	@$(RUN) scripts/quickstart.py

install: $(STAMP)  ## make .venv with rpft and all it needs

check: $(STAMP)  ## lint, formatting and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

# A file's tests share what they make. A worker that dies ends the run: with another in its place loadfile hangs.
test: $(STAMP)  ## the default test suite, in up to four processes
	$(RUN) -m pytest -n logical --maxprocesses 4 --dist loadfile --max-worker-restart 0

build: $(STAMP)  ## the wheel, into dist/
	rm -rf build
	$(RUN) -m build --wheel --outdir $(DIST)

docs: $(DOCS_STAMP)  ## the documentation as a site, in out/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

clean:  ## remove what was built; .venv, models and out stay
	rm -rf build $(DIST) *.egg-info .pytest_cache .ruff_cache
	find rpft scripts tests -name __pycache__ -prune -exec rm -rf {} +

$(DOCS_STAMP): $(STAMP)
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# torch comes first and alone, so that pip takes the build that this machine's registry offers (CPU or CUDA).
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { \
	  echo 'Error: rpft needs Python 3.10 to 3.13, and $(PYTHON) is not. Choose one: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'Error: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv' >&2; exit 2; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install torch==2.13.0
	$(RUN) -m pip install -c constraints.txt -e '.[dev,quickstart]'
	@touch $@
