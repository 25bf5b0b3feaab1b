#!/usr/bin/env bash
# A real SGLang server without a GPU: bash install.sh [FOLDER]
#
# Makes a virtual environment (1.8 GB, 2-8 minutes) in FOLDER, in $HEADWAY_SGLANG_VENV or in
# ~/.cache/headway/sglang-cpu. Nothing is done if it is there already and of this version.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
venv=${1:-${HEADWAY_SGLANG_VENV:-$HOME/.cache/headway/sglang-cpu}}
python=${PYTHON:-python3}
torch_version=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu

stamp=$venv/.installed-$(cat "$here/install.sh" "$here/requirements.txt" "$here"/shim/*.* \
    "$here"/shim/*/*.py | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then exit 0; fi

"$python" -m venv "$venv"
pip() { "$venv/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install "torch==$torch_version+cpu" 2> /dev/null \
    || pip install --extra-index-url "$cpu_index" "torch==$torch_version+cpu"
pip install --requirement "$here/requirements.txt"
pip install --no-deps sglang==0.5.23 xgrammar==0.2.7 torchvision==0.28.0
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$here"/shim/. "$site/"
rm -f "$venv"/.installed-*
touch "$stamp"
echo "SGLang for the CPU is in $venv"
