"""`headway drain URL SERVER [--undo]`: take a generation server out of traffic while it stays up."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.contracts.errors import ConfigError
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.secret import take_token

CONNECT_TIMEOUT_S = 5.0
USAGE = "usage: headway drain URL SERVER [--undo] [--token-env VARIABLE]"
UNDO = "--undo"


def main(argv: Sequence[str]) -> None:
    """Drain one server, or let it take traffic again; `headway status` names them."""
    words, token = take_token(argv)
    names = [word for word in words if word != UNDO]
    if len(names) != 2 or len(words) > 3:
        raise ConfigError(USAGE)
    url, server_id = names
    client = RemoteInferenceEngine(url, connect_timeout_s=CONNECT_TIMEOUT_S, token=token)
    try:
        client.drain_server(server_id, drain=UNDO not in words)
        servers = {server.server_id: server.state for server in client.status().servers}
    finally:
        client.destroy()
    sys.stdout.write(f"server {server_id} is {servers.get(server_id, 'gone')}\n")
