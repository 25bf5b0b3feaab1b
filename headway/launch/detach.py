"""`headway detach URL CONSUMER`: end a consumer that will not come back."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.contracts.errors import ConfigError
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.secret import take_token

CONNECT_TIMEOUT_S = 5.0


def main(argv: Sequence[str]) -> None:
    """Cancel what the consumer has not consumed, so that another one may attach."""
    names, token = take_token(argv)
    if len(names) != 2:
        raise ConfigError("usage: headway detach URL CONSUMER [--token-env VARIABLE]")
    url, consumer = names
    client = RemoteInferenceEngine(url, connect_timeout_s=CONNECT_TIMEOUT_S, token=token)
    cancelled = client.detach_consumer(consumer)
    client.destroy()
    sys.stdout.write(f"{consumer} is detached; {cancelled} trajectories were cancelled\n")
