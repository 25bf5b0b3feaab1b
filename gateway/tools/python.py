"""Programs that the model writes, run where they can do no harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from gateway.components.shared_services import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    Program,
    ProgramResult,
    SharedServices,
)
from gateway.tools.base import one_text, read_text

MAX_ERROR_CHARS = 2000
"""Maximum characters of a traceback, from its end: that is where it says what happened."""


class Python:
    """Runs Python in the sandbox; what it printed is the result. Every call starts from nothing."""

    name = "python"
    description = "Runs a Python program and returns what it prints."
    parameters = one_text("code", "The program")

    def __init__(
        self,
        *,
        cpu_s: Annotated[float, Field(gt=0.0, le=MAX_CPU_S)] = 4.0,
        memory_bytes: Annotated[int, Field(ge=16 << 20, le=MAX_MEMORY_BYTES)] = 512 << 20,
        max_output_chars: Annotated[int, Field(ge=1, le=1 << 20)] = 65_536,
    ) -> None:
        """
        Args:
            cpu_s: CPU seconds of one call.
            memory_bytes: of one call.
            max_output_chars: printed by one call.
        """
        self._blank = Program(
            "", cpu_s=cpu_s, memory_bytes=memory_bytes, max_output_chars=max_output_chars
        )

    async def call(self, arguments: Mapping[str, Any], services: SharedServices) -> str:
        program = replace(self._blank, source=read_text(arguments, "code"))
        return _describe(await services.sandbox.run(program))


def _describe(outcome: ProgramResult) -> str:
    if outcome.status == "ok":
        return outcome.stdout or "(the program printed nothing)"
    ended = f"[the program ended with {outcome.status.replace('_', ' ')}]"
    parts = (outcome.stdout, ended, outcome.stderr[-MAX_ERROR_CHARS:].strip())
    return "\n".join(part for part in parts if part)
