"""The images, built from the Dockerfile on a Debian that is made here: no registry is asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
REGISTRY = "localhost/"
TAG = "test"
BASE = f"{REGISTRY}headway-debian:12"
REDIS = f"{REGISTRY}headway-redis:{TAG}"
PROGRAMS = ("buildah", "podman", "runc", "mmdebstrap")
PACKAGES = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
LIMIT_S = 1200.0
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
REDIS_FILE = f"""FROM {BASE}
RUN apt-get update \\
    && apt-get install -y --no-install-recommends redis-server \\
    && rm -rf /var/lib/apt/lists/*
"""
FILES_AND_PROCESSES = ("nofile=4096:4096", "nproc=8192:8192")
"""No more than a container may ask for where its host is one itself."""
TORCH_VERSION = f"{torch.__version__.partition('+')[0]}+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_FOLDER = Path("/var/tmp/headway-torch-index")


def missing_programs() -> str:
    """What is not installed; empty if all is."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"apt-get install {' '.join(missing)}" if missing else ""


def run(*words: str | Path, given: str | None = None, timeout_s: float = LIMIT_S) -> str:
    """What a program prints; it must not fail."""
    done = subprocess.run(
        [str(word) for word in words],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr[-4000:]}"
    return done.stdout


@cache
def build(target: str) -> str:
    """Name of a target's image, built if it is not up to date."""
    _ensure_base()
    image = f"{REGISTRY}headway-{target}:{TAG}"
    arguments = [f"BASE_IMAGE={BASE}", f"ENGINE_IMAGE={BASE}"]
    options = ["--target", target]
    if target != "control":
        options += ["--volume", f"{_torch_index()}:/torch:ro"]
        arguments.append("TORCH_INDEX=file:///torch")
    _bud(image, [*options, *_each("--build-arg", arguments)], ROOT / "docker" / "Dockerfile")
    return image


@cache
def build_redis() -> str:
    """Name of an image with Debian's Redis."""
    _ensure_base()
    _bud(REDIS, [], None)
    return REDIS


def podman_run(*words: str, timeout_s: float = LIMIT_S) -> str:
    """What `podman run` prints; it must not fail."""
    limits = _each("--ulimit", FILES_AND_PROCESSES)
    return run("podman", "run", *limits, *words, timeout_s=timeout_s)


def size_mb(image: str) -> float:
    """Size on a host's disk."""
    (told,) = json.loads(run("podman", "image", "inspect", image))
    return float(told["Size"]) / 1e6


def sent_mb(image: str, folder: Path) -> float:
    """Size of what a registry would send: compressed layers."""
    run("podman", "save", "--compress", "--format", "docker-dir", "--output", folder, image)
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def _bud(image: str, options: Sequence[str], file: Path | None) -> None:
    words = ["buildah", "bud", "--isolation", "chroot", "--network", "host", "--layers"]
    words += ["--tag", image, *options, "--file", "-" if file is None else str(file)]
    run(*words, *([] if file is None else [str(ROOT)]), given=REDIS_FILE if file is None else None)


@cache
def _torch_index() -> Path:
    """A folder that serves as an index of PyTorch alone.

    pip brings it: where a machine has a copy, its pip knows, and the uv of an image does not.
    """
    folder = TORCH_FOLDER / "torch"
    words = ["download", "--quiet", "--no-deps", "--dest", folder, f"torch=={TORCH_VERSION}"]
    run(sys.executable, "-m", "pip", *words, "--extra-index-url", TORCH_INDEX)
    wheels = [f'<a href="{wheel.name}"></a>' for wheel in folder.glob("*.whl")]
    (folder / "index.html").write_text("\n".join(wheels))
    return TORCH_FOLDER


@cache
def _ensure_base() -> None:
    """A Debian with Python, which trusts what this machine trusts; made once."""
    if BASE in run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    hooks = [
        "rm -f $1/usr/lib/python3*/EXTERNALLY-MANAGED",
        f"cp -L {CERTIFICATES} $1{CERTIFICATES}",
        "rm -rf $1/usr/share/doc/* $1/usr/share/man/* $1/usr/share/locale/*",
        "rm -rf $1/var/cache/apt/* $1/var/lib/apt/lists/*",
    ]
    rootfs = run(
        "mktemp", "-p", "/var/tmp", "--suffix", ".tar", "headway-XXXXXX"
    ).strip()  # also of a run that was killed
    try:
        words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
        run(*words, *_each("--customize-hook", hooks), "bookworm", rootfs)
        container = run("buildah", "from", "scratch").strip()
        run("buildah", "add", container, rootfs, "/")
        variables = [f"{name}={CERTIFICATES}" for name in ("SSL_CERT_FILE", "PIP_CERT")]
        run("buildah", "config", *_each("--env", variables), container)
        run("buildah", "commit", "--rm", container, BASE)
    finally:
        Path(rootfs).unlink()


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
