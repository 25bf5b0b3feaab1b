#!/usr/bin/env bash
# A real SGLang server without a GPU: bash install.sh [FOLDER]
#
# Makes a virtual environment (1.8 GB) in FOLDER, in $HEADWAY_SGLANG_VENV or in ~/.cache/headway/sglang-cpu.
# Nothing is done if it is there already and of this version. $UV is the program uv.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
lock=$here/../../requirements/sglang-cpu.txt
venv=${1:-${HEADWAY_SGLANG_VENV:-$HOME/.cache/headway/sglang-cpu}}
torch_version=2.13.0

stamp=$venv/.installed-$(cat "$here/install.sh" "$lock" "$here"/shim/*.* "$here"/shim/*/*.py | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then exit 0; fi

rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
"${UV:-uv}" pip install --quiet --index-strategy unsafe-best-match \
    --python "$venv/bin/python" --no-deps --requirement "$lock"
# pip, which reads where this machine may have a copy.
"$venv/bin/pip" install -qq --no-compile "torch==$torch_version+cpu" 2> /dev/null \
    || "$venv/bin/pip" install -qq --no-compile --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch_version+cpu"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$here"/shim/. "$site/"
touch "$stamp"
echo "SGLang for the CPU is in $venv"
