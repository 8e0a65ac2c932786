# Everything runs in .venv, which `make setup` makes; only PYTHON comes from outside.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
STAMP := .venv/.set-up
CLUSTER_STAMP := .venv/.set-up-cluster
TORCH := $(shell grep '^torch==' constraints.txt)
QUICK := core scheduling kv config sampling structured oracle/test_every_method.py
ALL := "not gpu and not network and not cluster"
QUICK_ONES := "not slow and not gpu and not network and not cluster and not published"
# Each process of the tests would compile all modules, and each worker rewrite all assertions, where
# the environment says that nothing compiled is kept.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n $(JOBS) --dist loadgroup --durations=40

.PHONY: setup setup-cluster lib libs demo lint pytest quick check test test-full test-gpu test-cluster fix bench

setup: $(STAMP)

# torch goes first and alone: whichever build the machine's pip prefers (CPU or CUDA) then stays.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

# Ray as well, 0.35 GB: lint checks the code that calls it.
setup-cluster: $(CLUSTER_STAMP)

$(CLUSTER_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[ray]'
	touch $@

# A library that carries the digest of its sources is left as it is.
lib: setup
	$(BIN)/python build_kernels.py --here

libs: setup
	$(BIN)/python build_kernels.py

demo: lib
	$(BIN)/outdraft demo

lint: setup-cluster
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pyright -p benchmarks
	$(BIN)/lint-imports
	$(BIN)/mkdocs build -q

quick: lib
	$(PYTEST) -m $(QUICK_ONES) $(QUICK:%=tests/%)

check: lint
	$(MAKE) pytest ARGS='-m $(QUICK_ONES)'

test: lint
	$(MAKE) pytest ARGS='-m $(ALL)'

test-full: lint libs
	$(MAKE) pytest ARGS='--full -m $(ALL)'

pytest: lib
	$(PYTEST) $(ARGS)

test-gpu: lib
	$(BIN)/python -m pytest -m gpu

test-cluster: setup-cluster lib
	$(BIN)/python -m pytest -rs -m cluster

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: lib
	$(BIN)/python benchmarks/decode.py
