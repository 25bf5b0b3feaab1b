"""The real gateway and the real generation server of a later release: `newer_release.py KIND ...`.

Reports of servers, what a gateway shows of them, and sampled responses have one more optional field.
"""

from __future__ import annotations

import sys

from headway.contracts import types
from headway.contracts.http import servers

NOVELTY = "of a later release"


class LLMResponse(types.LLMResponse):
    novelty: str | None = NOVELTY


class ServerReport(servers.ServerReport):
    novelty: str | None = None


class ServerStatus(servers.ServerStatus):
    novelty: str | None = None


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    # All that reads or writes them is imported from here on.
    types.LLMResponse = LLMResponse  # type: ignore[misc]
    servers.ServerStatus = ServerStatus  # type: ignore[misc]
    servers.ServerReport = ServerReport  # type: ignore[misc]
    if kind == "gateway":
        from gateway.app.main import main
    else:
        ServerReport.model_fields["novelty"].default = NOVELTY
        ServerReport.model_rebuild(force=True)
        from inference_server.main import main
    main(rest)
