"""`headway rollback URL VERSION`: serve an earlier version until the next one is published."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.contracts.errors import ConfigError
from headway.contracts.http.weights import WeightStatus
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.secret import take_token

CONNECT_TIMEOUT_S = 5.0
USAGE = "usage: headway rollback URL VERSION [--token-env VARIABLE]"


def main(argv: Sequence[str]) -> None:
    """Go back to a kept version; `headway status` names them."""
    names, token = take_token(argv)
    if len(names) != 2:
        raise ConfigError(USAGE)
    url, version = names[0], parse_version(names[1], USAGE)
    client = RemoteInferenceEngine(url, connect_timeout_s=CONNECT_TIMEOUT_S, token=token)
    sys.stdout.write(describe(client.rollback(version)))
    client.destroy()


def parse_version(text: str, usage: str) -> int:
    """A version's number, or the usage."""
    if not text.isdecimal():
        raise ConfigError(f"{text!r} is no version; {usage}")
    return int(text)


def describe(weights: WeightStatus) -> str:
    """What serves now, in one line."""
    version = 0 if weights.committed is None else weights.committed.version
    held = "pinned" if weights.pinned is not None else "not pinned"
    return f"version {version} serves, {held}; the newest published is {weights.head}\n"
