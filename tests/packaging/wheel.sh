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

for extras in redis rewards export plots weights inference trainer trainer,tracking,lora,ray; do
    new_environment "$extras"
    install "$wheel[$extras]"
    "$python" "$here/import_all.py" "$extras"
    echo "wheel: every module that [$extras] is for is imported"
done
