"""Common parts of commands that call a running gateway: its URL, the token, and a client that is
closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headway.runtime.command_line import UrlType

if TYPE_CHECKING:
    from headway.contracts.http.weights import WeightStatus
    from headway.runtime.inference_client import RemoteInferenceEngine

CONNECT_TIMEOUT_S = 5.0
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def gateway_arguments(command: CommandT) -> CommandT:
    """Give a command the argument `url` and the option `token_env`."""
    token = click.option(
        "--token-env", metavar="VARIABLE", help="Environment variable that holds a bearer token."
    )
    url = click.argument("url", metavar="URL", type=UrlType())
    return url(token(command))


@contextmanager
def gateway_client(url: str, token_env: str | None) -> Iterator[RemoteInferenceEngine]:
    """A client of the gateway; the library behind it is imported now, not for help."""
    from headway.runtime.inference_client import RemoteInferenceEngine
    from headway.runtime.secret import read_token

    client = RemoteInferenceEngine(
        url, connect_timeout_s=CONNECT_TIMEOUT_S, token=read_token(token_env)
    )
    try:
        yield client
    finally:
        client.destroy()


def describe_versions(weights: WeightStatus) -> str:
    """Describe what serves now, in one line."""
    version = 0 if weights.committed is None else weights.committed.version
    held = "pinned" if weights.pinned is not None else "not pinned"
    return f"version {version} serves, {held}; the newest published is {weights.head}"
