#!/usr/bin/env bash
# The tests of `make test` with other versions than those of the lock: check.sh newest|lowest [PYTEST ARGUMENT]...
#
# newest: the last release of everything. Warnings of deprecation are listed at the end; other warnings are errors.
# lowest: the oldest release of each direct dependency that pyproject.toml allows, and what was new on the lock's day
# of their own dependencies and of the tools of the tests. Old packages warn of what new ones changed: no errors here.
# PyTorch is in both the version of `make install`: its registry has no older or newer build without CUDA.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/source.sh"
cd "$root"
which=$1
shift
# What an extra of ours brings, without the tools.
extras=(inference trainer lora ray redis export rewards plots tracking)

new_environment "$which"
case $which in
    newest)
        install --editable ".[dev]"
        warnings=(-W default::DeprecationWarning -W default::PendingDeprecationWarning -W default::FutureWarning)
        ;;
    lowest)
        export UV_EXCLUDE_NEWER=$(grep --only-matching --max-count 1 '[0-9]*-[0-9]*-[0-9]*' "$lock")
        echo "$torch" > "$WORK/torch.txt"
        install --resolution lowest-direct --requirements pyproject.toml "${extras[@]/#/--extra=}"
        "$UV" pip freeze --quiet --python "$python" > "$WORK/lowest.txt"
        install --constraints "$WORK/lowest.txt" --editable ".[dev]"
        warnings=(-W default)
        ;;
esac
"$PYTHON" .ci/versions.py "$UV" "$python" requirements/dev.txt
OMP_NUM_THREADS=1 "$python" -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
    -p no:cacheprovider -m "not extended" "${warnings[@]}" "$@"
