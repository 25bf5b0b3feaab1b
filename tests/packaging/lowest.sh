#!/usr/bin/env bash
# The control part's unit tests with the oldest dependencies that pyproject.toml allows: lowest.sh [PYTEST ARGUMENT]...
#
# PyTorch is the build that `make install` takes for the CPU: of older ones the index has none without CUDA.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/source.sh"
cd "$root"
# What has no bound here is as new as what `make lock` took.
[ -z "${CONSTRAINTS:-}" ] || export UV_EXCLUDE_NEWER=$(grep --only-matching --max-count 1 '[0-9]*-[0-9]*-[0-9]*' "$CONSTRAINTS")

new_environment lowest
extras=(--extra weights --extra redis --extra rewards --extra export)
install --resolution lowest-direct --only-binary :all: --requirements pyproject.toml "${extras[@]}"
"$UV" pip freeze --quiet --python "$python" > "$WORK/lowest.txt"
# Tools of the tests are new ones, and must leave the rest as it is.
install --constraints "$WORK/lowest.txt" \
    hypothesis jsonschema psutil pytest pytest-asyncio pytest-timeout pytest-xdist trustme

tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/unit/contracts tests/unit/runtime tests/unit/rollout tests/unit/launch tests/unit/text)
# Old packages warn of what new ones have changed: that is no error here.
PYTHONPATH=$root "$python" -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile -W default -m "not extended" \
    -p no:cacheprovider --quiet "${tests[@]}"
