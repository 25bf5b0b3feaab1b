# Two commands do all set-up on a fresh Debian machine: `make quickstart` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION ?= 2.13.0
# cpu, cu126 or cu130; empty takes what this machine's NVIDIA driver runs.
TORCH_BUILD ?=
TORCH_INDEX ?= https://download.pytorch.org/whl
# Versions of what is installed beside PyTorch; empty takes the newest ones.
CONSTRAINTS ?= constraints.txt
# Debian packages that the tests use besides Python's.
DEBIAN_PACKAGES := curl redis-server bubblewrap chromium chromium-driver
ARGS ?=
# Test processes; each starts gateways, servers and trainers of its own.
TEST_WORKERS ?= 2

export HF_HUB_OFFLINE := 1
# Tests start hundreds of processes: none of them need compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help lock quickstart test test-all test-rest test-gpu test-lowest wheel-test gpu-day coverage docs check check-schemas \
        format install system-packages sglang-cpu test-sglang clean

help:
	@echo "make quickstart   set up and train a tiny policy, end to end (ARGS='--steps 50 --sync')"
	@echo "make test         set up and run the tests, in minutes; says what it leaves to test-all"
	@echo "make test-all     set up and run all tests"
	@echo "make test-rest    run what 'make test' leaves out"
	@echo "make test-gpu     run the tests that want NVIDIA GPUs; the others never see any"
	@echo "make gpu-day      find out all that there is to find out on a GPU machine (ARGS=--dry: small, on the CPU)"
	@echo "make check        format, lint, types, import walls"
	@echo "make docs         build the documentation's site into build/site; broken links are errors"
	@echo "make coverage     run all tests and report which lines and branches they run (ARGS=tests/unit: some)"
	@echo "make wheel-test   build the wheel and try it and each extra in empty environments"
	@echo "make test-lowest  run the control part's unit tests with the oldest dependencies that we allow"
	@echo "make lock         take the newest versions of all dependencies into constraints.txt"
	@echo "make test-sglang  set up a real SGLang on the CPU (1.8 GB) and run its tests"

quickstart: $(VENV)/.installed
	$(BIN)/headway quickstart $(ARGS)

test: system-packages $(VENV)/.installed
	$(PYTEST) -m "not extended" $(ARGS)

test-all: system-packages $(VENV)/.installed
	$(PYTEST) $(ARGS)

test-rest: system-packages $(VENV)/.installed
	$(PYTEST) -m extended $(ARGS)

# Drivers and NCCL warn of what is no error.
test-gpu: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -W default -m gpu tests/gpu $(ARGS)

# The tests are among its steps, and want the Debian packages.
gpu-day: system-packages $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_day.py $(ARGS)

# A real SGLang in an environment of its own: $$HEADWAY_SGLANG_VENV, or ~/.cache/headway/sglang-cpu.
sglang-cpu:
	PYTHON="$(PYTHON)" bash tests/sglang_cpu/install.sh

test-sglang: sglang-cpu $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/integration/test_sglang_real.py $(ARGS)

check: $(VENV)/.installed check-schemas
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# By schemas that the program brings: nothing is fetched.
check-schemas: $(VENV)/.installed
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Processes that tests start and fork write files of their own, which are put together at the end, failed or not;
# those that were killed leave empty ones.
coverage: system-packages $(VENV)/.installed
	$(BIN)/coverage erase
	status=0; OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || status=$$?; \
	find . -maxdepth 1 -name '.coverage.*' -empty -delete; \
	$(BIN)/coverage combine --quiet; $(BIN)/coverage html --quiet --directory build/coverage; \
	$(BIN)/coverage report; exit $$status

wheel-test: $(VENV)/.installed
	PYTHON="$(PYTHON)" UV="$(CURDIR)/$(BIN)/uv" CONSTRAINTS="$(CONSTRAINTS)" bash tests/packaging/wheel.sh

test-lowest: $(VENV)/.installed
	PYTHON="$(PYTHON)" UV="$(CURDIR)/$(BIN)/uv" CONSTRAINTS="$(CONSTRAINTS)" bash tests/packaging/lowest.sh $(ARGS)

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed

# PyTorch and what comes with it depend on the machine.
lock: $(VENV)/.installed
	( echo "# Versions that the tests run with: those of $$(date --utc --iso-8601), for every Python. Made by \`make lock\`."; \
	  echo "torch==$(TORCH_VERSION)" | $(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
	      --override - --upgrade --quiet --no-header --no-annotate | grep --invert-match --extended-regexp '^(torch|triton|nvidia-|cuda-)' ) \
	    > constraints.new
	mv constraints.new constraints.txt

# torch first, so that no other package pulls in a build that this machine cannot use. PyPI has the one of cu130,
# without a suffix: === leaves out those with one. At the end a build that nobody named is tried.
$(VENV)/.installed: pyproject.toml Makefile $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	build=$(TORCH_BUILD); test -n "$$build" || build=$$($(PYTHON) headway/runtime/gpus.py); \
	if [ "$$build" = cu130 ]; then \
	    $(BIN)/pip install --quiet "torch===$(TORCH_VERSION)"; \
	else \
	    $(BIN)/pip install --quiet "torch==$(TORCH_VERSION)+$$build" 2> /dev/null \
	    || $(BIN)/pip install --quiet --extra-index-url "$(TORCH_INDEX)/$$build" "torch==$(TORCH_VERSION)+$$build"; \
	fi; \
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[dev]"; \
	if [ -z "$(TORCH_BUILD)" ] && [ "$$build" != cpu ]; then $(BIN)/python -c 'from weight_sync.device import choose_device; choose_device("cuda")'; fi
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
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info .coverage*
