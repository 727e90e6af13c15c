# `make demo` and `make test` from a clean clone; `make help` lists the rest.
# TORCH chooses the torch requirement: this release has CPU builds; on a GPU machine give your own, e.g. TORCH=torch
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# One OpenMP thread per core that this process may really use; more make torch crawl.
export OMP_NUM_THREADS ?= $(shell nproc)
export PYTHONSAFEPATH := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help env demo test lint test-slow bench clean

help:
	@echo "make demo       make the environment, train and measure the 2x2 on the embedded model (14 to 17 minutes)"
	@echo "make test       make the environment and run the tests"
	@echo "make env        make the environment in $(VENV)   [PYTHON=python3.12] [TORCH=torch==2.13.0]"
	@echo "make lint       formatting, style, types"
	@echo "make test-slow  the tests that take minutes each"
	@echo "make bench      what low-bit simulation costs"

# An environment is whole when its stamp is newer than what it was made from.
define install
	@echo "making the environment: $(1) (a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".$(2)"
	@touch $@
endef

$(VENV)/base.stamp: pyproject.toml
	$(call install,bitdraft and its packages,)

$(VENV)/test.stamp: pyproject.toml $(VENV)/base.stamp
	$(call install,what the tests need,[test$(comma)deepspeed])

$(VENV)/lint.stamp: pyproject.toml $(VENV)/test.stamp
	$(call install,what the checks need,[test$(comma)deepspeed$(comma)lint])

comma := ,

env: $(VENV)/base.stamp

demo: $(VENV)/base.stamp
	$(BIN)/python scripts/demo.py

test: $(VENV)/test.stamp
	$(BIN)/pytest

test-slow: $(VENV)/test.stamp
	$(BIN)/pytest -m slow

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layout.py

bench: $(VENV)/base.stamp
	$(BIN)/python scripts/bench/target_forward.py

clean:
	rm -rf $(VENV) build dist *.egg-info
