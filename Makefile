# Two commands do all the set-up: `make plan` and `make test`. Both make .venv first, from nothing but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The library that tests/trace reads traces with, in a .venv-trace of its own.
TRACE_VENV := .venv-trace
TRACE_BIN := $(TRACE_VENV)/bin
TRACE_STAMP := $(TRACE_VENV)/.installed
HTA_VERSION := 0.5.0

# The torch that tests/torch counts: that version and no other, in a .venv-torch of its own.
TORCH_VENV := .venv-torch
TORCH_BIN := $(TORCH_VENV)/bin
TORCH_STAMP := $(TORCH_VENV)/.installed
TORCH_VERSION := 2.13.0

.PHONY: plan test test-torch test-trace lint unit fuzz docs bench bench-fit bench-catalogue bench-map examples lock notebooks clean

plan: $(STAMP)
	$(BIN)/shardwise plan training llama-3.1-70b dgx-h100:8 --seq-len 8192 --global-batch 512 -o plan.json
	$(BIN)/shardwise export plan.json --to megatron-core

test: lint unit

# The step that shardwise counts, under real PyTorch on 4 and 8 processes (docs/counting-check.md).
test-torch: $(TORCH_STAMP)
	$(TORCH_BIN)/pytest tests/torch

# The trace of the 405B plan, read by a library that others read traces with.
test-trace: $(TRACE_STAMP)
	$(TRACE_BIN)/pytest tests/trace

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The notebooks are executed with the tests, the longest jobs first. Workers fill the cores, so each computes with one thread.
NOTEBOOKS := --nbmake --nbmake-timeout 600 notebooks

unit: $(STAMP)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal $(NOTEBOOKS) tests

notebooks: $(STAMP)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal --durations 0 $(NOTEBOOKS)

# The property tests with new examples each time; `make test` draws the same ones every time.
fuzz: $(STAMP)
	SHARDWISE_THOROUGH=1 $(BIN)/pytest -n auto --dist worksteal

# The site of the documentation, into site/; it fetches nothing when it is read.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Seconds, on this machine: printed, never asserted.
bench: $(STAMP)
	$(BIN)/python benchmarks/scale.py

# docs/fit.md, and one model in four checked by a search that knows nothing of the bounds of `fit`.
bench-fit: $(STAMP)
	$(BIN)/python benchmarks/fit_catalogue.py --out docs/fit.md
	$(BIN)/python benchmarks/fit_catalogue.py --every 4 --check-s 5

# docs/decision-map.md and its picture: which axes the fastest plan uses, cell by cell.
bench-map: $(STAMP)
	$(BIN)/python benchmarks/decision_map.py

# What the commands of the documentation print, written into its pages; read the difference before you commit it.
examples: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python -m tests.rewrite_examples

# The shipped catalogue of cells solved twice, ten kills in the midst of a smaller one, and a store of 10,000 cells read.
bench-catalogue: $(STAMP)
	$(BIN)/python benchmarks/bench_catalogue.py

# The versions that `make plan` and `make test` install, for review.
lock:
	$(BIN)/pip freeze --exclude-editable --exclude shardwise > requirements.lock

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit("shardwise needs Python 3.11 or later: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	touch $@

$(TORCH_STAMP): pyproject.toml requirements.lock
	test -x $(TORCH_BIN)/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock \
		--editable . pytest hypothesis torch==$(TORCH_VERSION)
	touch $@

$(TRACE_STAMP): pyproject.toml
	test -x $(TRACE_BIN)/python || $(PYTHON) -m venv $(TRACE_VENV)
	$(TRACE_BIN)/python -m pip install --quiet --disable-pip-version-check \
		--editable . pytest hypothesis HolisticTraceAnalysis==$(HTA_VERSION)
	touch $@

clean:
	rm -rf $(VENV) $(TORCH_VENV) $(TRACE_VENV) build dist site *.egg-info plan.json
