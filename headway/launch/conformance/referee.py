"""Plays every dialect's clients against a service, and prints which of their promises hold."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
import httpx

from headway.contracts.errors import ConfigError
from headway.launch.conformance import openai, sglang, sglang_updates, vllm
from headway.launch.conformance.service import Broken, LeftOut, Service
from headway.runtime.command import CommandFailed
from headway.runtime.secret import authorization

Check = Callable[[Service], Awaitable[str | None]]
DIALECTS: Mapping[str, Sequence[Check]] = {
    "sglang": sglang.CHECKS,
    "openai": openai.CHECKS,
    "vllm": vllm.CHECKS,
}
CLIENTS: Mapping[str, Sequence[Check]] = {
    "AReaL": (
        sglang.every_token_has_a_logprob,
        sglang.an_abort_returns_the_tokens_so_far,
        sglang.a_pause_holds_what_runs_and_loses_nothing,
        sglang.a_stop_token_ends_a_sequence,
    ),
    "slime, miles": (
        sglang.every_token_has_a_logprob,
        sglang.samples_of_one_prompt_are_a_list,
        sglang.an_abort_returns_the_tokens_so_far,
        sglang.null_is_the_same_as_absent,
        sglang.the_server_says_what_it_is,
        openai.engines_own_fields_at_their_defaults_are_taken,
    ),
    "verl": (
        sglang.every_token_has_a_logprob,
        sglang.an_abort_returns_the_tokens_so_far,
        openai.tokens_and_logprobs_come_with_a_completion,
    ),
    "sglang-router": (
        sglang.a_stream_grows_and_ends_as_an_answer_does,
        sglang.the_server_says_what_it_is,
        openai.engines_own_fields_at_their_defaults_are_taken,
        openai.models_are_listed,
    ),
    "TRL": (
        openai.tokens_and_logprobs_come_with_a_completion,
        openai.choices_are_as_many_as_asked_for,
        openai.a_chat_says_what_its_prompt_was,
        vllm.a_pause_is_told_and_ends,
        vllm.the_server_says_what_it_is,
    ),
    "verifiers, SkyRL, prime-rl": (
        openai.null_is_the_same_as_absent,
        openai.a_chat_says_what_its_prompt_was,
        vllm.tokens_come_with_logprobs,
        vllm.every_token_has_its_version,
    ),
    "openai, litellm": (
        openai.models_are_listed,
        openai.a_completion_of_token_ids_counts_them,
        openai.a_stream_ends_with_its_usage,
        openai.an_error_has_openais_shape,
    ),
}
"""What each client's own code relies on. One is served if all of it holds."""
Mark = Literal["ok", "FAILED", "left out"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one promise."""

    dialect: str
    promise: str
    mark: Mark
    remark: str


def judge(
    url: str,
    dialects: Sequence[str],
    weights: tuple[Path, Path] | None,
    token: str | None,
    tolerance: float,
    timeout_s: float,
    json_file: Path | None,
) -> None:
    """Print a line per promise, then the clients that are served.

    Args:
        dialects: those to play; none of them plays all.
        weights: two directories of weights of the model, which are made to serve by turns.
        json_file: gets the same as a JSON object.
    Raises:
        ConfigError: nothing answers there.
        CommandFailed: a promise is not kept.
    """
    verdicts = asyncio.run(
        _play(url, dialects or list(DIALECTS), weights, token, tolerance, timeout_s)
    )
    clients = dict(_clients(verdicts))
    for name, why in clients.items():
        click.echo(f"{'served' if not why else 'NOT SERVED':10}  {name}{why and ': ' + why}")
    if json_file is not None:
        report = {
            "url": url,
            "promises": [asdict(verdict) for verdict in verdicts],
            "clients": {name: why or "served" for name, why in clients.items()},
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    marks = Counter(verdict.mark for verdict in verdicts)
    click.echo(f"{marks['ok']} hold, {marks['FAILED']} do not, {marks['left out']} left out")
    if marks["FAILED"] or not marks["ok"]:
        raise CommandFailed(f"{url} does not keep all that its clients rely on")


async def _play(
    url: str,
    dialects: Sequence[str],
    weights: tuple[Path, Path] | None,
    token: str | None,
    tolerance: float,
    timeout_s: float,
) -> list[Verdict]:
    headers = authorization(token)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s) as http:
        try:
            await http.get("/health")
        except httpx.HTTPError as error:
            raise ConfigError(f"nothing answers at {url}: {error}") from error
        service = Service(http, weights, tolerance, timeout_s)
        verdicts = []
        for dialect in dialects:
            checks = [*DIALECTS[dialect]]
            if dialect == "sglang" and weights is not None:
                checks += sglang_updates.CHECKS
            for check in checks:
                verdict = await _judged(dialect, check, service)
                remark = f": {verdict.remark}" if verdict.remark else ""
                click.echo(f"{verdict.mark:8}  {dialect:6}  {verdict.promise}{remark}")
                verdicts.append(verdict)
    return verdicts


async def _judged(dialect: str, check: Check, service: Service) -> Verdict:
    mark: Mark = "ok"
    try:
        remark = await check(service) or ""
    except LeftOut as error:
        mark, remark = "left out", str(error)
    except Broken as error:
        mark, remark = "FAILED", str(error)
    except httpx.HTTPError as error:
        mark, remark = "FAILED", f"{type(error).__name__}: {error}"
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        mark, remark = "FAILED", f"an answer of another shape: {type(error).__name__}: {error}"
    return Verdict(dialect, promise_of(check), mark, " ".join(remark.split()))


def promise_of(check: Check) -> str:
    """The promise, as a sentence."""
    return check.__name__.replace("_", " ")


def _clients(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    """Each client whose promises were all looked at, and the first that does not hold."""
    marks = {(verdict.dialect, verdict.promise): verdict.mark for verdict in verdicts}
    for client, checks in CLIENTS.items():
        needed = [(check.__module__.rpartition(".")[2], promise_of(check)) for check in checks]
        if all(each in marks for each in needed):
            yield client, next((promise for d, promise in needed if marks[d, promise] != "ok"), "")
