# Two commands do all set-up on a fresh Debian machine: `make quickstart` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION ?= 2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Debian packages that the tests use besides Python's.
DEBIAN_PACKAGES := curl redis-server bubblewrap chromium chromium-driver
ARGS ?=
# Test processes; each starts gateways, servers and trainers of its own.
TEST_WORKERS ?= 2

export HF_HUB_OFFLINE := 1
# Tests start hundreds of processes: none of them need compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help quickstart test test-all test-rest check format install system-packages sglang-cpu test-sglang clean

help:
	@echo "make quickstart   set up and train a tiny policy, end to end (ARGS='--steps 50 --sync')"
	@echo "make test         set up and run the tests, in minutes; says what it leaves to test-all"
	@echo "make test-all     set up and run all tests"
	@echo "make test-rest    run what 'make test' leaves out"
	@echo "make check        format, lint, types, import walls"
	@echo "make test-sglang  set up a real SGLang on the CPU (1.8 GB) and run its tests"

quickstart: $(VENV)/.installed
	$(BIN)/headway quickstart $(ARGS)

test: system-packages $(VENV)/.installed
	$(PYTEST) -m "not extended" $(ARGS)

test-all: system-packages $(VENV)/.installed
	$(PYTEST) $(ARGS)

test-rest: system-packages $(VENV)/.installed
	$(PYTEST) -m extended $(ARGS)

# A real SGLang in an environment of its own: $$HEADWAY_SGLANG_VENV, or ~/.cache/headway/sglang-cpu.
sglang-cpu:
	PYTHON="$(PYTHON)" bash tests/sglang_cpu/install.sh

test-sglang: sglang-cpu $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/integration/test_sglang_real.py $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed

# torch first, so that no other package pulls in its CUDA build where there is no NVIDIA GPU.
$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then \
	    $(BIN)/pip install --quiet "torch==$(TORCH_VERSION)"; \
	else \
	    $(BIN)/pip install --quiet "torch==$(TORCH_VERSION)+cpu" 2> /dev/null \
	    || $(BIN)/pip install --quiet --extra-index-url "$(CPU_INDEX)" "torch==$(TORCH_VERSION)+cpu"; \
	fi
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

system-packages:
	@missing=(); \
	for package in $(DEBIAN_PACKAGES); do \
	    dpkg-query --show --showformat '$${Status}' $$package 2> /dev/null | grep -q 'ok installed' || missing+=($$package); \
	done; \
	if [ $${#missing[@]} -eq 0 ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing Debian packages: $${missing[*]}"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$${missing[@]}" > /dev/null; \
	else \
	    echo "not installed: $${missing[*]}; tests that need them are skipped and say so"; \
	fi

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
