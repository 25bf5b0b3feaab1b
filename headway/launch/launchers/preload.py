"""Modules that the processes of a run import, and their environment; light itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headway.runtime.fork_server import ForkServer

SPIN_COUNT = "3000"
"""Turns that a computing thread spins for before it sleeps. The 300,000 of libgomp take the cores from
the other processes on them; none at all costs small models half their speed."""
PRELOADED = (
    "inference_server.main",
    "inference_server.backends.embedded.backend",
    "trainer.main",
    "trainer.experiments.policy",
    "trainer.backends.fsdp2",
    "trainer.interfaces.ppo_actor",
    "transformers.generation.utils",
    "torch.distributed.checkpoint.state_dict",
    "uvloop",
    "gateway.app.main",
)
"""Modules that the processes of a run import, by name: the launcher itself imports none of them."""


def preload() -> ForkServer:
    """Start importing, for a run whose settings are not read yet."""
    return ForkServer(PRELOADED, child_environment(None))


def child_environment(threads: int | None) -> Mapping[str, str]:
    """Return the variables that every child gets besides this process's environment."""
    given = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1"}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        given["GOMP_SPINCOUNT"] = SPIN_COUNT
    return given if threads is None else given | {"OMP_NUM_THREADS": str(threads)}
