# Posthouse from a checkout. `make run` is the whole service; `make help` lists the rest.

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
# `make python` is for .ci/run: it names the interpreter.
.PHONY: python help run deps deps-dev test check fmt bench lock clean

VENV := .venv
IN := $(VENV)/bin
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

# The interpreter .venv is made with: PYTHON=… to choose, else the first in range, best one that can make a .venv.
PYTHON ?= $(shell for able in 'import ensurepip' ''; do for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c "$$able" 2>/dev/null && $$p -c '$(IN_RANGE)' 2>/dev/null && echo $$p && exit; done; done)

PIP_INSTALL := $(IN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement
UV_COMPILE := $(IN)/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command 'make lock' pyproject.toml

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

run: deps ## the whole service: embedded Postgres, migrations, every process of the Procfile
	@exec $(IN)/python cli.py up

deps: $(VENV)/.deps ## what the service needs, into .venv, from requirements.lock
deps-dev: $(VENV)/.deps-dev ## what tests and checks need as well, from requirements-dev.lock

test: deps-dev $(VENV)/pgbouncer ## the tests, against real servers they bring themselves (ARGS='-k relay' for some)
	@$(IN)/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

check: deps-dev ## format, lint, types, and the gates of the house
	@$(IN)/ruff format --quiet --check --output-format concise . || { echo 'not formatted: make fmt'; exit 1; }
	@$(IN)/ruff check --quiet --output-format concise .
	@$(IN)/mypy .
	@$(IN)/python -m pytest --quiet tests/test_gates.py

fmt: deps-dev ## format and fix what can be fixed
	@$(IN)/ruff format --quiet .
	@$(IN)/ruff check --quiet --fix .

bench: deps-dev ## measure everything beside others' queues, half an hour (ARGS='drain enqueue' for some, alone)
	@exec $(IN)/python -m bench $(or $(ARGS),all --peers)

lock: deps-dev ## renew both lock files from pyproject.toml
	@$(UV_COMPILE) --upgrade --output-file requirements.lock
	@$(UV_COMPILE) --upgrade --group dev --constraint requirements.lock --output-file requirements-dev.lock

clean: ## remove .venv and caches; the data folder stays
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/.peers
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@echo '$(PYTHON)'

# A stamp is newer than its lock file when .venv holds what the file says.
$(VENV)/.deps: requirements.lock | $(IN)/python
	@echo 'installing what the service needs into $(VENV)'
	@$(PIP_INSTALL) requirements.lock
	@touch $@

$(VENV)/.deps-dev: requirements-dev.lock $(VENV)/.deps
	@echo 'installing what tests and checks need into $(VENV)'
	@$(PIP_INSTALL) requirements-dev.lock
	@touch $@

# For the tests behind a pooler, which is no wheel; made once, empty where it is installed or cannot be had.
$(VENV)/pgbouncer: | $(IN)/python
	@sh tests/pgbouncer.sh $@ || true

# Interpreters keep the date of their build, so `python` is only looked for, never compared by date (`|`).
$(IN)/python:
	@test -n '$(PYTHON)' || { echo 'no Python 3.11, 3.12 or 3.13 found; install one, or: make PYTHON=/path/to/python3.13'; exit 1; }
	@$(PYTHON) -c '$(IN_RANGE)' || { echo '$(PYTHON) does not start or is not Python 3.11 to 3.13'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo '$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv'; exit 1; }
	@$(PYTHON) -m venv $(VENV)
