"""Services that workflows and rewards may use besides generation: a sandbox, and calls to the
outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headway.contracts.config.gateway import OutboundConfig
from headway.contracts.errors import ConfigError, Forbidden
from headway.runtime.outages import Outages

ProgramStatus = Literal["ok", "runtime_error", "compile_error", "timeout", "memory", "output_limit"]


MAX_CPU_S = 600.0
MAX_MEMORY_BYTES = 64 << 30
"""Maximum memory of one program, whatever a request asks for."""


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
class ProgramResult:
    """Result of a program. What it printed or returned proves nothing by itself: compare it
    outside."""

    status: ProgramStatus
    stdout: str = ""
    stderr: str = ""
    results: tuple[Any, ...] = ()
    """Return values of the calls, as far as the program got, in JSON's types; `{"error": text}` for
    one that raised, `{"value": ...}` for one that returned, with `exact` where JSON has no word for
    the value (`gateway.sandbox.values`)."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    max_rss_bytes: int = 0


class Sandbox(Protocol):
    """Runs untrusted programs."""

    async def run(self, program: Program) -> ProgramResult:
        """Run one program to its end, or to one of its limits.

        Raises:
            RewardOutage: the sandbox itself failed; the program has no result.
        """


class Outbound(Protocol):
    """Calls to services that the gateway's config allows."""

    outages: Outages

    async def post(self, url: str, body: Any, timeout_s: float) -> Any:
        """POST a JSON body; the JSON that came back. It is sent again while the service is away.

        Raises:
            Forbidden: the config does not allow this URL.
            ServiceAway: the service was away for too long.
            BackendError: there was no answer in time, or with something other than JSON and status 200.
        """

    async def post_once(self, url: str, body: Any, timeout_s: float) -> Any:
        """As `post`, for a body that must not be sent again; see `Outages.call`.

        Raises:
            ServiceUnreachable: the service is away.
        """


class TaskPool(Protocol):
    """Does long work away from the event loop."""

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a process that is killed when it takes too long, and return its
        result.

        Args:
            function: at the top of a module; it returns JSON's types.
            args: of types that can be pickled.

        Raises:
            RewardError: it took too long.
            RewardOutage: the process was lost.
            ServiceError: what the function raised.
        """


class InlineTaskPool:
    """Does it here: for a caller that has no event loop to keep going."""

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@dataclass(frozen=True, slots=True)
class SharedServices:
    """Handed to every workflow and asynchronous reward."""

    sandbox: Sandbox
    outbound: Outbound
    task_pool: TaskPool = field(default_factory=InlineTaskPool)


@dataclass(slots=True)
class NoSandbox:
    """Placeholder where no sandbox could be set up; it says why."""

    reason: str = field(default="this service has no sandbox")

    async def run(self, program: Program) -> ProgramResult:
        raise ConfigError(f"a program cannot be run: {self.reason}")


class NoOutbound:
    """Allows no call."""

    def __init__(self) -> None:
        self.outages = Outages(OutboundConfig().service_wait_s)

    async def post(self, url: str, body: Any, timeout_s: float) -> Any:
        raise Forbidden(f"{url} may not be called: `outbound.allow` of the config names nothing")

    post_once = post
