"""`headway pin URL [VERSION | --release]`: hold a published version while others are published."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.contracts.errors import ConfigError
from headway.launch.rollback import describe, parse_version
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.secret import take_token

CONNECT_TIMEOUT_S = 5.0
USAGE = "usage: headway pin URL [VERSION | --release] [--token-env VARIABLE]"
RELEASE = "--release"


def main(argv: Sequence[str]) -> None:
    """Pin a version, the one that serves if none is named, or go on with the newest."""
    names, token = take_token(argv)
    if len(names) not in (1, 2):
        raise ConfigError(USAGE)
    url, *wanted = names
    version = parse_version(wanted[0], USAGE) if wanted and wanted[0] != RELEASE else None
    client = RemoteInferenceEngine(url, connect_timeout_s=CONNECT_TIMEOUT_S, token=token)
    if not wanted:
        version = client.status().version
    sys.stdout.write(describe(client.pin(version)))
    client.destroy()
