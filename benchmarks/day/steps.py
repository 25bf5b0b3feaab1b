"""Steps of a first day on a machine with GPUs, in their order."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
MINUTE = 60.0
FIRST = {"CUDA_VISIBLE_DEVICES": "0"}
NO_NVLINK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""One node behaves as several do: a peer that dies breaks the connection."""


@dataclass(frozen=True, slots=True)
class Step:
    """One question, and the command that answers it."""

    name: str
    question: str
    argv: tuple[str, ...]
    timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    needs: int = 1
    """GPUs."""
    skip: str = ""
    """Why it is not run."""
    tail_lines: int = 25
    """Number of last lines of its output in the report."""


def make_steps(
    num_gpus: int, is_dry: bool, sglang_python: str | None, is_brief: bool = False
) -> list[Step]:
    """All steps; what this machine cannot do has a reason to be skipped.

    Args:
        num_gpus: that may be used.
        is_dry: small, on the CPU.
        sglang_python: interpreter of an environment with SGLang.
        is_brief: fewer rounds.
    """
    found = [
        *_machine(),
        *_tests(is_dry),
        *_kernels(is_dry),
        *_groups(is_dry),
        *_engine(is_dry, is_brief),
        *_runs(num_gpus, is_dry, is_brief),
        *_sglang(num_gpus, is_dry, sglang_python),
    ]
    if is_dry:
        return [replace(s, env={**s.env, "CUDA_VISIBLE_DEVICES": ""}) for s in found]
    return [_fitting(step, num_gpus) for step in found]


def _fitting(step: Step, num_gpus: int) -> Step:
    if step.skip or step.needs <= num_gpus:
        return step
    return replace(step, skip=f"wants {step.needs} GPUs, there are {num_gpus}")


def _machine() -> Iterator[Step]:
    yield Step(
        "driver",
        "Which driver is it, and which build of PyTorch does it run?",
        (sys.executable, str(ROOT / "headway" / "runtime" / "gpus.py")),
        MINUTE,
    )
    has_smi = shutil.which("nvidia-smi") is not None
    yield Step(
        "topology",
        "Which GPUs are joined by NVLink, and which cores and NICs are near?",
        ("nvidia-smi", "topo", "-m"),
        MINUTE,
        skip="" if has_smi else "there is no nvidia-smi",
        tail_lines=60,
    )
    yield _probe("versions", "Which PyTorch, NCCL, SGLang and vLLM are installed?", 3 * MINUTE)


def _tests(is_dry: bool) -> Iterator[Step]:
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    some = ("tests/unit/launch/test_placement.py",)
    workers = str(max(2, min(8, (os.cpu_count() or 2) // 2)))
    side_by_side = ("-n", workers, "--dist", "loadfile", "--no-loadscope-reorder")
    yield Step(
        "tests",
        "Do all tests pass beside GPUs that they must not see?",
        (*pytest, *(some if is_dry else (*side_by_side, "-m", "not extended"))),
        60 * MINUTE,
        {"OMP_NUM_THREADS": "1"},
    )
    on_gpu = (*pytest, "-W", "default", "-m", "gpu", "-rs")
    on_network = "tests/gpu/test_collective_nccl.py"
    which = on_network if is_dry else "tests/gpu"  # dry, all are skipped
    yield Step("tests-gpu", "Do the tests on GPUs pass?", (*on_gpu, which), 30 * MINUTE)
    yield Step(
        "tests-network",
        "Do they pass over sockets, where a killed receiver breaks its connection?",
        (*on_gpu, on_network),
        30 * MINUTE,
        NO_NVLINK,
        needs=2,
        skip="a CPU has no NCCL" if is_dry else "",
    )


def _kernels(is_dry: bool) -> Iterator[Step]:
    few = ("--device", "cpu", "--shapes", "3", "--heads", "2") if is_dry else ()
    for name, env in (("", {}), ("-without-cudnn", {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"})):
        step = _probe(
            f"attention{name}",
            "What does attention cost for a length that it has not seen?",
            10 * MINUTE,
            *few,
            probe="attention",
            env={**FIRST, **env},
        )
        yield replace(step, skip="a CPU has no cuDNN" if is_dry and name else "")
    sizes = ("--device", "cpu", "--tokens", "64", "--vocabulary", "2000", "--rounds", "1")
    full = ("--device", "cuda", "--dtype", "bfloat16", "--hidden", "4096", "--tokens", "16384")
    for chunk in (1024, 8192):
        step = _benchmark(
            f"logprobs-{chunk}",
            f"What do log-probabilities cost in tiles of {chunk} tokens?",
            15 * MINUTE,
            "logprobs.py",
            *(sizes if is_dry else full),
            *("--chunk-tokens", str(chunk)),
        )
        yield replace(step, skip="as in tiles of 1024" if is_dry and chunk > 1024 else "")


def _groups(is_dry: bool) -> Iterator[Step]:
    yield _probe(
        "two-ranks",
        "Do two ranks compute what one does, on NCCL?",
        20 * MINUTE,
        *(("--dry",) if is_dry else ()),
        env={} if is_dry else {"CUDA_VISIBLE_DEVICES": "0,1"},
        needs=2,
    )


def _engine(is_dry: bool, is_brief: bool) -> Iterator[Step]:
    seconds = "1" if is_dry else "5" if is_brief else "20"
    profile = ("--in-flight", "2" if is_dry else "128", "--seconds", seconds)
    yield _benchmark(
        "decode",
        "Where does the time of a decode step go?",
        15 * MINUTE,
        "decode_profile.py",
        *profile,
    )
    swaps = ("--swaps", "3", "--sequences", "2")
    if not is_dry:
        swaps = ("--size", "500M", "--swaps", "10" if is_brief else "60")
    yield _benchmark(
        "gateway",
        "What does a gateway add to the latency of an engine?",
        15 * MINUTE,
        "gateway_cost.py",
        *("--engine", "embedded_torch", "--rounds", "1" if is_dry else "2" if is_brief else "5"),
        *("--size", "tiny" if is_dry else "1.5b", "--tokens", "4" if is_dry else "64"),
        *("--in-flight", "2" if is_dry else "64", "--requests", "4"),
    )
    yield _benchmark(
        "swap",
        "How long does generation pause for a version?",
        20 * MINUTE,
        "weight_swap.py",
        *swaps,
    )


def _runs(num_gpus: int, is_dry: bool, is_brief: bool) -> Iterator[Step]:
    ranks = 2 if is_dry else min(8, num_gpus)
    size = "tiny" if is_dry else "1.5b"
    steps = "2" if is_dry else "5" if is_brief else "20"
    yield _probe(
        "dpo",
        "Are the losses of a DPO run the same on one rank and on all, and what is its MFU?",
        60 * MINUTE,
        *("--size", size, "--ranks", str(ranks), "--steps", steps),
        *(() if is_dry else ("--pairs", "32", "--length", "1500")),
    )
    half = 1 if is_dry else max(1, min(4, num_gpus // 2))
    transports = ("disk",), ("shared_memory",), ("collective", "ipc"), ("collective", "nccl")
    for transport, *backend in transports:
        name = (backend or [transport])[0]
        yield _probe(
            f"grpo-{name.replace('_', '-')}",
            f"Does every process have a GPU of its own, and what does a version cost over {name}?",
            60 * MINUTE,
            *("--size", size, "--ranks", str(half), "--servers", str(half)),
            *("--transport", transport, "--steps", steps),
            *(("--backend", "gloo" if is_dry and name == "nccl" else name) if backend else ()),
            probe="grpo",
            needs=2 if name == "nccl" else 1,  # NCCL wants a GPU for each of its members
        )
    yield _probe(
        "grpo-kill",
        "Does a run go on when a server is killed while it receives a version?",
        60 * MINUTE,
        *("--size", size, "--ranks", "1", "--servers", "2", "--transport", "collective"),
        *("--backend", "gloo" if is_dry else "nccl", "--steps", "4" if is_dry else "20", "--kill"),
        probe="grpo",
        env={} if is_dry else NO_NVLINK,
        needs=3,
    )


def _sglang(num_gpus: int, is_dry: bool, python: str | None) -> Iterator[Step]:
    skip = "" if python and not is_dry else "HEADWAY_SGLANG_PYTHON names no environment with SGLang"
    if is_dry:
        skip = "an engine on the CPU is `make test-sglang`"
    for receive in ("files", "group"):
        transport = ("disk",) if receive == "files" else ("collective", "--backend", "nccl")
        step = _probe(
            f"sglang-{receive}",
            f"The same with two SGLang servers that receive {receive}?",
            60 * MINUTE,
            *("--size", "1.5b", "--ranks", str(max(1, min(4, num_gpus - 2))), "--servers", "2"),
            *("--transport", *transport, "--steps", "20"),
            *("--sglang", python or "", "--receive", receive),
            probe="grpo",
            needs=3,
        )
        yield replace(step, skip=skip)


def _probe(
    name: str,
    question: str,
    timeout_s: float,
    *arguments: str,
    probe: str = "",
    env: Mapping[str, str] | None = None,
    needs: int = 1,
) -> Step:
    """A script `benchmarks/gpu_….py`, by default of the step's own name."""
    file = f"gpu_{probe or name.replace('-', '_')}.py"
    argv = (sys.executable, str(ROOT / "benchmarks" / file), *arguments)
    return Step(name, question, argv, timeout_s, env or {}, needs)


def _benchmark(name: str, question: str, timeout_s: float, file: str, *arguments: str) -> Step:
    argv = (sys.executable, str(ROOT / "benchmarks" / file), *arguments)
    return Step(name, question, argv, timeout_s, FIRST)
