# make demo and make test set up everything they need in .venv, the first time; after that they start at once.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
GPU    ?= $(wildcard /dev/nvidia[0-9]*)
TESTS  ?=

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --disable-pip-version-check

export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
export PYTHONDONTWRITEBYTECODE = # else each of hundreds of processes compiles all of penstock anew

.PHONY: help demo test test-all lint bench docs clean

help:
	@echo "make demo      show penstock at work"
	@echo "make test      lint, type check and run the tests (minutes)"
	@echo "make test-all  the same with the slow tests"
	@echo "make lint      lint and type check alone"
	@echo "make bench     run the benchmarks"
	@echo "make docs      build the site into build/site"
	@echo "make clean     remove .venv and all caches"
	@echo
	@echo "PYTHON=python3.12 chooses the interpreter, TESTS='tests/ops -k norm' the tests."

demo: $(VENV)/.core
	@$(PY) -m penstock.demo

# Types are checked while the tests run; what pyright says comes after what pytest says, and each can fail the target.
RUFF    = $(PY) -m ruff check --quiet --output-format=concise .
PYRIGHT = $(PY) -m pyright --pythonpath $(PY)
PYTEST  = $(PY) -m pytest -q -n 2 --dist worksteal
BOTH    = said=$$(mktemp); trap 'rm -f "$$said"' EXIT; $(PYRIGHT) >"$$said" 2>&1 & types=$$!; failed=0; \
          $(PYTEST) $(1) || failed=$$?; wait $$types || failed=$$?; cat "$$said"; exit $$failed

test: $(VENV)/.dev
	@$(RUFF)
	@$(call BOTH,$(TESTS))
	@$(PY) benchmarks/gpu_evidence.py check

test-all: $(VENV)/.dev $(VENV)/.docs
	@$(RUFF)
	@$(call BOTH,-m "not cuda" $(TESTS))

lint: $(VENV)/.dev
	@$(RUFF)
	@$(PYRIGHT)

bench: $(VENV)/.dev
	@set -e; for script in $(wildcard benchmarks/bench_*.py); do echo "== $$script"; $(PY) $$script; done

SPHINX = $(PY) -m sphinx -q -W --keep-going -c tools/docs -d build/doctrees . build/site

docs: $(VENV)/.docs
	@$(SPHINX)
	@echo "The site is in build/site: open build/site/index.html."

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	  "penstock needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there): try make PYTHON=python3.12" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment: Debian and Ubuntu have it in the package python3-venv." >&2; exit 1; }
	@$(PIP) install --quiet --upgrade pip
	@touch $@

$(VENV)/.core: pyproject.toml | $(VENV)/.made
	@echo "Installing penstock and its libraries (numpy, numba, ...) into $(VENV): about a minute, once."
	@$(PIP) install --quiet --editable ".[server,grammar]"
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.core
	@echo "Installing what builds the site (Sphinx, ...) into $(VENV), once."
	@$(PIP) install --quiet --editable ".[docs]"
	@touch $@

# torch comes first and pinned. Its CUDA build brings gigabytes that are useless without a GPU, so there pip is asked
# beforehand what it would fetch; if that is a CUDA build, torch is left out and the tests that need it are not run.
$(VENV)/.dev: pyproject.toml | $(VENV)/.made
	@echo "Installing torch and the development tools into $(VENV): 3 GB on disk and a few minutes, once."
	@if [ -z "$(GPU)" ] && $(PIP) install --dry-run "$(TORCH)" 2>/dev/null | grep -q "^Would install.* nvidia-"; then \
	  echo "No GPU here, and pip knows only the CUDA build of $(TORCH): going on without torch and the tests that need it."; \
	  echo "For all tests let pip find the CPU build (PIP_EXTRA_INDEX_URL) or take the CUDA one: make clean; make test GPU=1"; \
	  $(PIP) install --quiet --editable ".[server,grammar,gguf,check]"; \
	else \
	  $(PIP) install --quiet "$(TORCH)" && $(PIP) install --quiet --editable ".[dev]"; \
	fi
	@touch $@ $(VENV)/.core
