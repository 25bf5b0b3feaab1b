"""What the tests on real engines share: where engines are, and what transformers says of a response."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from headway.contracts.types import LLMRequest, LLMResponse
from inference_server.backends.base import GenerationBackend
from tests.numeric.models import extend_cache, reference_logits, reference_logprobs

ROOT = Path(__file__).parents[2]
ModelOf = Callable[[int], torch.nn.Module]
"""Returns the weights of a version."""


PACKAGES = {"clients": "sglang_router", "helm": "helm_python"}
"""What an environment that is no engine's has."""


def engine_python(engine: str) -> Path:
    """Interpreter of the environment with an engine, `sglang` or `vllm`, with `clients` or `helm`; it may
    not be there."""
    default = Path.home() / ".cache" / "headway" / environment_name(engine)
    return Path(os.environ.get(f"HEADWAY_{engine.upper()}_VENV", default)) / "bin" / "python"


def environment_name(engine: str) -> str:
    """Name of an environment, which is its target in the Makefile, too."""
    return engine if engine in PACKAGES else f"{engine}-cpu"


def needs(engine: str) -> list[pytest.MarkDecorator]:
    """Marks of a module whose tests run on an engine, or with `clients` or `helm`."""
    venv = engine_python(engine).parents[1]
    package = PACKAGES.get(engine, engine)
    is_there = any(venv.glob(f"lib/python*/site-packages/{package}"))
    reason = (
        f"no {package} in {venv}; run `make {environment_name(engine)}`, or set "
        f"HEADWAY_{engine.upper()}_VENV"
    )
    return [
        pytest.mark.extended,
        pytest.mark.timeout(400),
        pytest.mark.skipif(not is_there, reason=reason),
    ]


def show(text: str) -> None:
    """For `pytest -s`."""
    sys.stdout.write(f"\n  {text}")


def error_of(response: LLMResponse, expected: torch.Tensor) -> float:
    """Largest difference of the logprobs; 0 without tokens."""
    got = torch.tensor(response.output_logprobs, dtype=torch.float64)
    return (got - expected).abs().max().item() if len(got) else 0.0


async def check_logprobs(
    backend: GenerationBackend,
    model: torch.nn.Module,
    asked: Sequence[LLMRequest],
    tolerance: float,
) -> None:
    """Generate all at once; each token is as probable as this model finds it, and of one version."""
    responses = await asyncio.gather(*map(backend.generate, asked))
    errors = []
    for one, response in zip(asked, responses, strict=True):
        scale, count = one.gconfig.temperature or 1.0, one.gconfig.max_new_tokens
        expected = reference_logprobs(model, list(one.input_ids), response.output_tokens, scale)
        errors.append(error_of(response, expected))
        assert response.version_runs == [(backend.version, 0, count)]
    show(f"max error of {len(asked)} requests' logprobs: {max(errors):.1e}")
    assert max(errors) < tolerance


@torch.no_grad()
def replayed(model_of: ModelOf, asked: LLMRequest, response: LLMResponse) -> torch.Tensor:
    """Logprobs over one kept cache, each token by the version that is said to have sampled it."""
    cache, fed, logprobs = DynamicCache(), list(asked.input_ids), []
    for token, version in zip(response.output_tokens, response.output_versions, strict=True):
        logits = extend_cache(model_of(version), cache, fed)
        fed = [token]
        logprobs.append(torch.log_softmax(logits[-1].double(), dim=-1)[token])
    return torch.stack(logprobs) if logprobs else torch.zeros(0)


def recomputed(model_of: ModelOf, asked: LLMRequest, response: LLMResponse) -> torch.Tensor:
    """Logprobs of each run after a fresh pass of its version over all before it."""
    parts = [
        reference_logprobs(
            model_of(version),
            [*asked.input_ids, *response.output_tokens[:start]],
            response.output_tokens[start:end],
        )
        for version, start, end in response.version_runs
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def shaped_logprobs(model: torch.nn.Module, asked: LLMRequest, tokens: list[int]) -> torch.Tensor:
    """Logprobs under penalties, biases and temperature, as `SamplingConfig` defines them."""
    gconfig = asked.gconfig
    with torch.no_grad():
        logits = reference_logits(model, [*asked.input_ids, *tokens]).double()
    rows = logits[len(asked.input_ids) - 1 : -1]
    for token, bias in gconfig.logit_bias.items():
        rows[:, token] += bias
    expected = []
    for position, token in enumerate(tokens):
        seen = torch.tensor(tokens[:position], dtype=torch.long)
        counts = torch.bincount(seen, minlength=rows.shape[1])
        penalty = gconfig.frequency_penalty * counts + gconfig.presence_penalty * (counts > 0)
        row = (rows[position] - penalty) / (gconfig.temperature or 1.0)
        expected.append(torch.log_softmax(row, dim=-1)[token])
    return torch.stack(expected)


def allowed_logprobs(
    model: torch.nn.Module, asked: LLMRequest, tokens: list[int], allowed: list[list[int]]
) -> torch.Tensor:
    """Logprobs of an output among the tokens that a grammar allows at each position."""
    with torch.no_grad():
        logits = reference_logits(model, [*asked.input_ids, *tokens]).double()
    rows = logits[len(asked.input_ids) - 1 : -1]
    return torch.stack(
        [
            torch.log_softmax(row[ids], dim=-1)[ids.index(token)]
            for row, token, ids in zip(rows, tokens, allowed, strict=True)
        ]
    )


async def check_bundled_run(folder: Path, file: str, backend: Mapping[str, Any]) -> None:
    """Let `headway run` train three steps by a file of `examples/gsm8k`, with other flags alone.

    Args:
        backend: settings below `server.backend`.
    """
    make = runpy.run_path(str(ROOT / "examples" / "gsm8k" / "make_tiny_model.py"))
    make["make_tiny_model"](None, folder / "model")
    rows = [{"question": f"{n} + {n} =", "answer": f"#### {n + n}"} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "--config": ROOT / "examples" / "gsm8k" / file,
        "--model": folder / "model",
        "--gateway.ledger": folder / "ledger.sqlite",
        **{
            f"--server.backend.{name}": value if isinstance(value, Path) else json.dumps(value)
            for name, value in backend.items()
        },
        "--trainer.run-dir": folder / "run",
        "--trainer.data.path": folder / "rows.jsonl",
        "--trainer.data.batch-size": 2,
        "--trainer.rollout.group-size": 2,
        "--trainer.sampling.max-new-tokens": 8,
        "--trainer.trainer.total-steps": 3,
    }
    command = ["-m", "headway.launch.cli", "run", *map(str, chain(*flags.items()))]
    started = time.monotonic()
    run = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=PIPE)
    output, errors = await run.communicate()
    assert run.returncode == 0, errors.decode()
    show(f"a run of three steps took {time.monotonic() - started:.0f} s")
    summary = json.loads(output.splitlines()[-1])
    assert (summary["steps"], summary["trajectories"], summary["versions"]) == (3, 12, 3)
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
