# Two commands do all the set-up: `make plan` and `make test`. Both make .venv first, from nothing but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: plan test lint unit bench lock clean

plan: $(STAMP)
	$(BIN)/shardwise plan training llama-3.1-70b dgx-h100:8 --seq-len 8192 --global-batch 512 -o plan.json
	$(BIN)/shardwise export plan.json --to megatron-core

test: lint unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest -n auto --dist worksteal

# Seconds, on this machine: printed, never asserted.
bench: $(STAMP)
	$(BIN)/python benchmarks/scale.py

# The versions that `make plan` and `make test` install, for review.
lock:
	$(BIN)/pip freeze --exclude-editable --exclude shardwise > requirements.lock

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit("shardwise needs Python 3.11 or later: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info plan.json
