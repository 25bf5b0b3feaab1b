"""Programs in a sandbox service elsewhere, by SandboxFusion's API (`POST /run_code`).

How well a program is held there is that service's matter. Calls are made by our own code around the
program, and their results come back as marked lines of its standard output. Such a service reports no
CPU time: `cpu_s` of a result is the wall time that it reports, and the limit is on wall time.
"""

from __future__ import annotations

import secrets
from importlib.resources import files
from typing import Any

from gateway.components.shared_services import (
    Outbound,
    Program,
    ProgramResult,
    ProgramStatus,
)
from gateway.sandbox.verdict import read_report
from headway.contracts.errors import BackendError, RewardOutage
from headway.runtime.offload import offload, size_of
from headway.runtime.outbound import shown

ANSWER_S = 30.0
"""Seconds beyond a program's wall time, for the service to queue and to answer."""
COMPILE_S = 10.0

_CODE = """{execute}

_out = sys.stdout
def _emit(message):
    _out.write("\\n{mark}" + json.dumps(message) + "\\n")
    _out.flush()

sys.exit(execute({source!r}, {calls!r}, _emit))
"""


class RemoteSandbox:
    """Runs programs at a URL."""

    def __init__(self, url: str, outbound: Outbound, wall_factor: float) -> None:
        self._url = url.rstrip("/") + "/run_code"
        self._outbound = outbound
        self._wall_factor = wall_factor
        inside = files("gateway.sandbox.inside")
        self._execute = inside.joinpath("execute.py").read_text()

    async def start(self) -> None:
        """Nothing to start; whether anybody answers shows at the first program."""

    async def aclose(self) -> None:
        """Nothing to end."""

    async def run(self, program: Program) -> ProgramResult:
        """See `shared_services.Sandbox`.

        Raises:
            Forbidden: `outbound.allow` of the config does not name the service.
        """
        mark = secrets.token_hex(16)
        wall_s = self._wall_factor * program.cpu_s
        body = {
            "code": _CODE.format(
                execute=self._execute, mark=mark, source=program.source, calls=list(program.calls)
            ),
            "stdin": program.stdin,
            "language": "python",
            "compile_timeout": COMPILE_S,
            "run_timeout": wall_s,
            "memory_limit_MB": program.memory_bytes >> 20,
        }
        try:
            answer = await self._outbound.post(self._url, body, wall_s + ANSWER_S)
        except BackendError as error:
            raise RewardOutage(f"the sandbox at {self._url} failed: {error}") from error
        try:
            return await offload(size_of(answer), _outcome, program, answer, mark)
        except (KeyError, TypeError, ValueError) as error:
            raise RewardOutage(
                f"the sandbox at {self._url} answered {shown(answer)}; wanted status Success or "
                "Failed with a run_result"
            ) from error


def _outcome(program: Program, answer: dict[str, Any], mark: str) -> ProgramResult:
    if answer["status"] not in ("Success", "Failed"):
        raise ValueError(answer["status"])
    run = answer["run_result"]
    lines = str(run.get("stdout") or "").split("\n" + mark)
    report = read_report("\n".join(part.partition("\n")[0] for part in lines[1:]))
    # What follows a mark's own line was printed between two calls.
    stdout = lines[0] + "".join(part.partition("\n")[2] for part in lines[1:])
    took_s = float(run.get("execution_time") or 0.0)
    limit = program.max_output_chars
    return ProgramResult(
        status=_status(run, report.ended, len(stdout) > limit),
        stdout=stdout[:limit],
        stderr=str(run.get("stderr") or "")[:limit],
        results=report.results[: len(program.calls)],
        cpu_s=took_s,
        wall_s=took_s,
    )


def _status(run: dict[str, Any], ended: ProgramStatus | None, is_over: bool) -> ProgramStatus:
    if run["status"] == "TimeLimitExceeded":
        return "timeout"
    if run["status"] not in ("Finished", "Error"):
        raise ValueError(run["status"])
    if is_over:
        return "output_limit"
    if ended is not None:
        return ended
    return "ok" if run.get("return_code") == 0 else "runtime_error"
