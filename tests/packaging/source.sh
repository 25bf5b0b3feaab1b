# Sourced by the scripts beside it: the wheel, and environments in which nothing else is installed.
#
# $UV (the program), $PYTHON (which Python), $WORK (a folder that is deleted at the end).
root=$(readlink -f "$(dirname "${BASH_SOURCE[0]}")/../..")
UV=${UV:-uv}
PYTHON=${PYTHON:-python3}
lock=$root/requirements/dev.txt
torch="torch==2.13.0+cpu"
export UV_NO_PROGRESS=1
# What pip is told of a folder of wheels, uv is told too; PyTorch's index is asked only without one.
export UV_FIND_LINKS=${UV_FIND_LINKS:-$("$PYTHON" -m pip config get global.find-links 2> /dev/null || true)}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
echo "$torch" > "$WORK/torch.txt"

# Build the wheel from what the distribution is made of, and from nothing else.
build_wheel() {
    mkdir "$WORK/source"
    (cd "$root" && cp -r pyproject.toml README.md LICENSE headway gateway weight_sync inference_server trainer "$WORK/source")
    "$UV" build --quiet --wheel --build-constraint "$lock" --out-dir "$WORK/dist" "$WORK/source"
    wheel=$(echo "$WORK"/dist/*.whl)
}

# new_environment NAME: an empty one; $python is its interpreter.
new_environment() {
    "$UV" venv --quiet --python "$PYTHON" "$WORK/$1"
    python=$WORK/$1/bin/python
}

# install REQUIREMENT...: into the environment; PyTorch, where it is wanted, without CUDA.
install() {
    "$UV" pip install --quiet --python "$python" --override "$WORK/torch.txt" "$@" 2> "$python.errors" \
        || "$UV" pip install --quiet --python "$python" --override "$WORK/torch.txt" \
            --index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match "$@" \
        || { cat "$python.errors"; return 1; }
}
