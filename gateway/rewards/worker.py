"""A process that scores answers, one at a time, until its connection ends.

Frames are a length of four bytes and a payload: pickles on the way in, which only the gateway writes;
JSON on the way out, so that nothing a verifier returns or raises can break who asked.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import time
from functools import lru_cache
from typing import IO, Any

from gateway.components.arguments import build_component
from gateway.rewards.base import Answer, Reward, as_result, reward_raised
from headway.contracts.errors import ServiceError

READY = b"ready"


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Send one frame."""
    stream.write(len(payload).to_bytes(4, "big") + payload)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end."""
    size = stream.read(4)
    return stream.read(int.from_bytes(size, "big")) if len(size) == 4 else None


def serve(connection: socket.socket, memory_bytes: int) -> None:
    """Judge what the connection brings."""
    os.setsid()  # what a verifier starts is killed with it
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stream: IO[bytes]
    with connection.makefile("rwb") as stream:  # type: ignore[assignment]
        write_frame(stream, READY)
        while (frame := read_frame(stream)) is not None:
            reply = _reply(frame) | {"cpu_s": time.process_time()}
            write_frame(stream, json.dumps(reply).encode())


def _reply(frame: bytes) -> dict[str, Any]:
    """Return the score, or the error; without an answer, only make the reward.

    What a function returned, where one came instead of a reward.
    """
    name = "?"
    try:
        asked, given = pickle.loads(frame)
        if callable(asked):
            name = asked.__name__
            return {"value": asked(*given)}
        name, reward = _reward_of(asked)
        if given is None:
            (getattr(reward, "check", None) or _nothing)()
            return {}
        result = as_result(name, reward(Answer(*given)))
    except ServiceError as error:
        return {"error": error.to_body().model_dump()}
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a verifier is no way out
        return {"error": reward_raised(name, error).to_body().model_dump()}
    return {"score": result.score, "details": result.details, "verdict": result.verdict}


def _nothing() -> None:
    """Check nothing: for a reward without a check."""


@lru_cache(maxsize=256)
def _reward_of(reward_bytes: bytes) -> tuple[str, Any]:
    factory, name, arguments = pickle.loads(reward_bytes)
    reward: Reward = build_component(factory, "reward", name, json.loads(arguments))
    return name, reward
