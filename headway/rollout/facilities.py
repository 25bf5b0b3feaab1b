"""What workflows and rewards may use besides generation: a sandbox, and calls to the outside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headway.contracts.errors import ConfigError, Forbidden

ProgramStatus = Literal["ok", "runtime_error", "compile_error", "timeout", "memory", "output_limit"]


MAX_CPU_S = 600.0
MAX_MEMORY_BYTES = 64 << 30
"""Of one program, whatever a request asks for."""


@dataclass(frozen=True, slots=True)
class Program:
    """Untrusted Python to run."""

    source: str
    stdin: str = ""
    calls: tuple[str, ...] = ()
    """Expressions that are evaluated after `source`, each in its own right; their results come back.
    With calls, what `source` keeps for `__name__ == "__main__"` does not run."""
    cpu_s: float = 4.0
    """CPU seconds, over `source` and all calls."""
    memory_bytes: int = 512 << 20
    max_output_chars: int = 65_536


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. What it printed or returned proves nothing by itself: compare it outside."""

    status: ProgramStatus
    stdout: str = ""
    stderr: str = ""
    results: tuple[Any, ...] = ()
    """What the calls returned, as far as they came, in JSON's types; `{"error": text}` for one that
    raised, `{"value": ...}` for one that returned, with `exact` where JSON has no word for the value
    (`headway.rollout.sandbox.values`)."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    max_rss_bytes: int = 0


class Sandbox(Protocol):
    """Runs untrusted programs."""

    async def run(self, program: Program) -> Outcome:
        """Run one program to its end, or to one of its limits.

        Raises:
            RewardOutage: the sandbox itself failed; the program was not judged.
        """


class Outbound(Protocol):
    """Calls to services that the gateway's config allows."""

    async def post(self, url: str, body: Any, timeout_s: float) -> Any:
        """POST a JSON body; the JSON that came back.

        Raises:
            Forbidden: the config does not allow this URL.
            BackendError: nobody answered in time, or with something other than JSON and status 200.
        """


@dataclass(frozen=True, slots=True)
class Facilities:
    """Handed to every workflow and asynchronous reward."""

    sandbox: Sandbox
    outbound: Outbound


@dataclass(slots=True)
class NoSandbox:
    """Stands where no sandbox could be set up, and says why."""

    reason: str = field(default="this service has no sandbox")

    async def run(self, program: Program) -> Outcome:
        raise ConfigError(f"a program cannot be run: {self.reason}")


class NoOutbound:
    """Allows no call."""

    async def post(self, url: str, body: Any, timeout_s: float) -> Any:
        raise Forbidden(f"{url} may not be called: `outbound.allow` of the config names nothing")
