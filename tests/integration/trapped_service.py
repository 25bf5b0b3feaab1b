"""The real gateway and the real generation server, with traps: `trapped_service.py TRAPS KIND ...`.

gateway   prepared    enough servers have staged a version, nothing is recorded
          recorded    it is recorded, no server was told to commit
server    staged      it has read and proven a version, and has not said so
          swapping    it was told to commit, and has not
          swapped     it has, and has not said so
"""

from __future__ import annotations

import sys
from typing import Any

from tests.integration.traps import Traps


def gateway(traps: Traps, argv: list[str]) -> None:
    from gateway.app.main import main
    from gateway.versions.publication_state import PublicationState

    PublicationState.commit = traps.around_async(PublicationState.commit, "prepared", "recorded")
    main(argv)


def server(traps: Traps, argv: list[str]) -> None:
    from inference_server import engine
    from inference_server.main import main

    make_backend = engine.make_backend

    def make_trapped(*args: Any) -> Any:
        backend: Any = make_backend(*args)
        backend.stage = traps.around(backend.stage, after="staged")
        backend.swap = traps.around_async(backend.swap, "swapping", "swapped")
        return backend

    engine.make_backend = make_trapped
    main(argv)


if __name__ == "__main__":
    folder, kind, *rest = sys.argv[1:]
    {"gateway": gateway, "server": server}[kind](Traps(folder), rest)
