# `make test`, `make demo` and `make lint` first make a virtual environment and install from the lock, if need be.
PYTHON ?= python3
VENV ?= .venv
# Tests run in two processes with one thread each, a file (of the laws a family) in one of them (tests/conftest.py);
# `make test PYTEST="-k heads"` picks some.
PYTEST ?= -n 2 --no-loadscope-reorder --durations 10
BIN = $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: install test test-slow test-all test-portable demo lint format clean mutants papers wheel release

install: $(VENV)/installed

$(VENV)/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# What is run before a commit: all laws, tables and tests of single parts but the slow ones.
test: install
	$(BIN)/python -m pytest $(PYTEST) -m "not slow"

# Tests marked `slow`: a fresh install, the papers' scripts, the tour, the commands of the docs, large cases.
test-slow: install
	$(BIN)/python -m pytest $(PYTEST) -m slow

# Both in one run, as CI does it: what they share is made once.
test-all: install
	$(BIN)/python -m pytest $(PYTEST)

# All tests as other processors compute: without vector instructions, then with AVX2. CPU kernels add in another order
# there, so a test that compares two ways of computing one thing by bits fails here. By hand, once an issue.
test-portable: install
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest $(PYTEST)
	MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest $(PYTEST)

# Lines broken one at a time, and whether the tests notice: a random sample, for ten minutes.
mutants: install
	nice -n 19 $(BIN)/python tests/mutants.py

# The papers' tables and figures (docs/results.md): trains what is missing, and goes on where it was stopped.
CHECKPOINTS ?= checkpoints
papers: install
	$(BIN)/python benchmarks/train_checkpoints.py papers --out $(CHECKPOINTS)
	$(BIN)/python benchmarks/papers/apparatus.py --checkpoints $(CHECKPOINTS)
	$(BIN)/python benchmarks/record.py

demo: install
	$(BIN)/rotation-merge demo

# Wheel and sdist into dist/, offline once .venv is there, and what they hold is checked.
wheel: install
	$(BIN)/python docs/release.py

# make release VERSION=0.2.0: version, changelog, commit, tag, wheel and sdist (CONTRIBUTING.md).
release: install
	$(BIN)/python docs/release.py $(VERSION)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
