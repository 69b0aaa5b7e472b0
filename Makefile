# `make test` is what CI runs. Everything is installed once into $(VENV).

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import venv' >/dev/null 2>&1 && echo $$p && break; done)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := reference optimized parity kernels golden tests src/deeptwin/__init__.py

# the rooms have generic names: without this, `python -m` would put them on the path
export PYTHONSAFEPATH := 1
# numpy and torch threads disturb each other in the interpreter: five times slower without these
export OPENBLAS_NUM_THREADS := 1
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test check gate ascend compile peers clean

setup: $(STAMP)

# torch comes first and by exact version: a range can take a CUDA build of several gigabytes.
# tile-kernels asks for Python 3.12 but its torch references run on 3.11
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[triton,tilelang,test,peers,vision,engine,dev]'
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python tile-kernels==2.1.0
	touch $@

demo: $(STAMP)
	$(BIN)/deeptwin demo

check: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy -p deeptwin
	$(BIN)/python -m pytest -q tests/test_structure.py

gate: $(STAMP)
	$(BIN)/deeptwin gate

# the lowering tools of the Ascend 950, unpacked apart in the user's cache: one of their wheels would replace triton
ascend: $(STAMP)
	$(BIN)/python -m deeptwin.parity.builds.ascend_tools

compile: ascend
	$(BIN)/deeptwin compile --require sm90 --require sm100 --require ascend950

# whole tiny models of transformers, stage by stage
peers: $(STAMP)
	$(BIN)/python -m deeptwin.parity.peer_table

test: check compile peers
	$(BIN)/python -m pytest -n 2
	$(BIN)/deeptwin gate
	$(BIN)/deeptwin mutants
	$(BIN)/deeptwin golden verify

clean:
	rm -rf $(VENV) build dist deeptwin-failures src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
