"""`headway status URL`: what a gateway or server is doing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from headway.contracts.errors import ConfigError, NotFound
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.secret import take_token

CONNECT_TIMEOUT_S = 5.0


def main(argv: Sequence[str]) -> None:
    """Print the status, the ledger's audit and the published versions as JSON."""
    names, token = take_token(argv)
    if len(names) != 1:
        raise ConfigError("usage: headway status URL [--token-env VARIABLE]")
    client = RemoteInferenceEngine(names[0], connect_timeout_s=CONNECT_TIMEOUT_S, token=token)
    sys.stdout.write(client.status().model_dump_json(indent=1) + "\n")
    sys.stdout.write(client.audit().model_dump_json(indent=1) + "\n")
    with suppress(NotFound):  # one server alone keeps no versions
        sys.stdout.write(client.weights().model_dump_json(indent=1) + "\n")
    client.destroy()
