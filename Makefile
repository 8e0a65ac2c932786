# Everything runs in .venv, which `make setup` makes; only PYTHON comes from outside.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
STAMP := .venv/.set-up
TORCH := $(shell grep '^torch==' constraints.txt)
QUICK := core scheduling kv config sampling structured oracle/test_every_method.py
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.PHONY: setup demo lint quick check test test-full test-gpu fix bench

setup: $(STAMP)

# torch goes first and alone: whichever build the machine's pip prefers (CPU or CUDA) then stays.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/outdraft demo

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

quick: setup
	$(PYTEST) -m "not slow and not gpu and not network" $(QUICK:%=tests/%)

check: lint
	$(PYTEST) -m "not slow and not gpu and not network"

test: lint
	$(PYTEST) -m "not gpu and not network"

test-full: lint
	$(PYTEST) --full -m "not gpu and not network"

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/decode.py
