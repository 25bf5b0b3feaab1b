"""`headway status URL`: what a gateway or server is doing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.contracts.errors import ConfigError
from headway.runtime.inference_client import RemoteInferenceEngine

CONNECT_TIMEOUT_S = 5.0


def main(argv: Sequence[str]) -> None:
    """Print the status and the ledger's audit as JSON."""
    if len(argv) != 1:
        raise ConfigError("usage: headway status URL")
    client = RemoteInferenceEngine(argv[0], connect_timeout_s=CONNECT_TIMEOUT_S)
    sys.stdout.write(client.status().model_dump_json(indent=1) + "\n")
    sys.stdout.write(client.audit().model_dump_json(indent=1) + "\n")
    client.destroy()
