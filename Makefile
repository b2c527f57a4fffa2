# One-word commands. audit, test, faults and check make .venv first when it is missing.
#   make audit ARGS="--phase decode --layers 0-3"     options of pytest parity/
#   make faults ARGS="--component rope --jobs 1"      options of python -m parity.sweep
#   make env PYTHON=python3.12                        another interpreter
#   make env PIP_ARGS="--extra-index-url URL"         options of pip, e.g. an index that has torch's CPU build

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
BIN := .venv/bin

.PHONY: help audit test faults check env clean

help:
	@echo "make audit   audit the bundled checkpoint on the CPU; ends with its verdict and the report's path"
	@echo "make test    the project's own tests"
	@echo "make faults  plant every listed fault, one audit each, and score what the audit says of it (half an hour on two cores)"
	@echo "make check   ruff, mypy, import contracts, and every kernel compiled for sm_90a and sm_100a"
	@echo "make env     .venv from constraints.txt (audit, test, faults and check do it when it is missing)"
	@echo "make clean   remove caches of the tools; .venv and reports stay"

audit: .venv/ready
	$(BIN)/python -m pytest parity/ $(ARGS)

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest parity/unit -n 2 $(ARGS)

faults: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m parity.sweep $(ARGS)

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m production.cubins

env: .venv/ready

# The mark is written last, so that an installation that broke off is done again.
.venv/ready: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is not Python 3.11 or newer; next: make env PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf build .hypothesis .mypy_cache .ruff_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
