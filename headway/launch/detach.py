"""`headway detach URL CONSUMER`: end a consumer that will not come back."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.contracts.errors import ConfigError
from headway.runtime.inference_client import RemoteInferenceEngine

CONNECT_TIMEOUT_S = 5.0


def main(argv: Sequence[str]) -> None:
    """Cancel what the consumer has not consumed, so that another one may attach."""
    if len(argv) != 2:
        raise ConfigError("usage: headway detach URL CONSUMER")
    url, consumer = argv
    client = RemoteInferenceEngine(url, connect_timeout_s=CONNECT_TIMEOUT_S)
    cancelled = client.detach_consumer(consumer)
    client.destroy()
    sys.stdout.write(f"{consumer} is detached; {cancelled} trajectories were cancelled\n")
