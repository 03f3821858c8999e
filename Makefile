# Needs Python and make; every target makes the virtual environment that it needs.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Settings: make demo PYTHON=/path/to/python3.12, make test ARGS="-k verify", ...
PYTHON ?=
PYTHON313 ?=
VENV ?= .venv
WORKDIR ?=
WORKERS ?= 2
ARGS ?=

# Bytecode is made where a module is imported: most never are.
PIP = -m pip --disable-pip-version-check install --quiet --no-compile
# A file stays with one worker, so that each program is compiled once.
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --durations=20
QUICK = -m "not slow and not parity"
# Most of what the quick tests take is compiling: theirs does less, and the slow tests run
# as users do. XLA's older emitters of fusions halve what is left; jax 0.12 has lost their
# flag, and dies of those that it does not know.
QUICKLY = JAX_DISABLE_MOST_OPTIMIZATIONS=1
OLDER = XLA_FLAGS="$(strip $(XLA_FLAGS) --xla_cpu_use_fusion_emitters=false)"

# Prints the first interpreter of versions $(1), on PATH or among pyenv's, that runs.
# (A pyenv shim on PATH that only prints an error is passed over.)
find_python = for want in $(1); do \
	for python in "python$$want" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$want*/bin/python \
	    python3 python; do \
	  if "$$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$$want')" \
	      >/dev/null 2>&1; then echo "$$python"; exit 0; fi; \
	done; done

# Makes the virtual environment $(1) with $(2), or else the first of the versions $(3).
make_venv = python='$(2)'; \
	if [ -z "$$python" ]; then python=$$($(call find_python,$(3))); fi; \
	if [ -z "$$python" ]; then \
	  echo "$(1) needs Python $(4), and none was found on PATH or among pyenv's" \
	    "versions: install one, or name it with $(5)=/path/to/python." >&2; exit 1; fi; \
	if ! "$$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] not in '$(3)'.split())"; then \
	  echo "$(5)=$$python cannot be used: $(1) needs Python $(4)." >&2; exit 1; fi; \
	echo "Making $(1) with $$("$$python" --version) ($$python)"; \
	if ! "$$python" -m venv $(1); then \
	  echo "$$python cannot make a virtual environment: it lacks the modules venv or" \
	    "ensurepip (on Debian and Ubuntu, the package python3-venv)." >&2; \
	  rm -rf $(1); exit 1; fi

.PHONY: help demo bench test test-slow test-parity test-newest test-colab test-all \
	lint format types docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.core  ## decode with the shipped pairs, both ways: repair, then translate
	$(VENV)/bin/python -m experiments.decode --config=configs/demo.py \
	  --workdir=$(or $(WORKDIR),runs/demo) $(ARGS)
	$(VENV)/bin/python -m experiments.decode --config=configs/demo_ende.py \
	  --workdir=$(or $(WORKDIR),runs/demo)_ende $(ARGS)

bench: $(VENV)/.core  ## time decoder steps against the memory bandwidth of this machine
	$(VENV)/bin/python -m experiments.benchmark --config=configs/bench.py \
	  --workdir=$(or $(WORKDIR),runs/bench) $(ARGS)

test: $(VENV)/.dev  ## the tests that need neither torch nor patience
	$(QUICKLY) $(OLDER) $(VENV)/bin/python $(PYTEST) $(QUICK) $(ARGS)

test-slow: $(VENV)/.dev  ## the slow tests
	$(VENV)/bin/python $(PYTEST) -m "slow and not parity" $(ARGS)

test-parity: $(VENV)/.peers  ## the tests that compare with torch and transformers
	$(VENV)/bin/python $(PYTEST) -m parity $(ARGS)

test-newest: .venv-newest/.test  ## the tests on Python 3.13 with the newest jax and flax
	$(QUICKLY) .venv-newest/bin/python $(PYTEST) $(QUICK) $(ARGS)

test-colab: .venv-colab/.test  ## the tests on Python 3.13 with the jax that Colab has
	$(QUICKLY) .venv-colab/bin/python $(PYTEST) $(QUICK) $(ARGS)

# One after the other, also under `make -j`: each uses all the workers.
test-all:  ## the tests on all three sets of versions
	$(MAKE) test
	$(MAKE) test-newest
	$(MAKE) test-colab

lint: $(VENV)/.dev  ## ruff: rules and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.dev  ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.dev  ## mypy
	$(VENV)/bin/mypy

# Not --quiet, which would hide from --strict the warnings that it counts.
docs: $(VENV)/.docs  ## build the pages of docs/ into site/; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

clean:  ## remove environments, caches and builds; runs/ stays
	rm -rf $(VENV) .venv-newest .venv-colab .cache .mypy_cache .pytest_cache .ruff_cache
	rm -rf .hypothesis
	rm -rf build dist site specjax.egg-info
	find specjax experiments configs tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is made once; a stamp in it records each set of packages installed.

$(VENV)/.made:
	@$(call make_venv,$(VENV),$(PYTHON),3.11 3.12 3.13,3.11 to 3.13,PYTHON)
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml constraints-3.11.txt
	$(VENV)/bin/python $(PIP) -c constraints-3.11.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(VENV)/bin/python $(PIP) -c constraints-3.11.txt -e '.[test,dev,plots,data]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(VENV)/bin/python $(PIP) -c constraints-3.11.txt -e '.[docs]'
	@touch $@

$(VENV)/.peers: $(VENV)/.dev
	$(VENV)/bin/python $(PIP) -c constraints-3.11.txt -e '.[peers]'
	@touch $@

.venv-%/.made:
	@$(call make_venv,.venv-$*,$(PYTHON313),3.13,3.13,PYTHON313)
	@touch $@

.venv-%/.test: .venv-%/.made constraints-3.13-%.txt pyproject.toml
	.venv-$*/bin/python $(PIP) -c constraints-3.13-$*.txt -e '.[test,plots,data]'
	@touch $@

.PRECIOUS: .venv-%/.made .venv-%/.test
