#!/usr/bin/env bash
# The wheel in empty environments: what each extra brings is enough for what it is for, and types are seen.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
source "$here/source.sh"
export OMP_NUM_THREADS=1 UV_CONSTRAINT=$lock  # hashes are checked, too
build_wheel
cd "$WORK"  # not the checkout: what is imported is what was installed

new_environment control
install "$wheel"
"$python" "$here/try_control.py"
"$python" "$here/import_all.py"
echo "wheel: the control part answers, without torch"

new_environment checker
install mypy
cp "$here/typed_use.py" .  # beside the checkout's packages, mypy would read those
"$python" -m mypy --strict --python-executable "$WORK/control/bin/python" typed_use.py
echo "wheel: a strict type checker sees the types"

try_extras() {
    new_environment "$1"
    install "$wheel[$1]"
    "$python" "$here/import_all.py" "$1"
    echo "wheel: every module that [$1] is for is imported"
}
export -f new_environment install try_extras
export UV PYTHON WORK here wheel
# The longest first.
printf '%s\n' trainer,tracking,lora,ray trainer inference weights rewards plots export redis \
    | xargs -P 2 -I{} bash -euo pipefail -c 'try_extras {}'
