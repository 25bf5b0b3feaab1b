"""Our own train backend passes the suite that we give to authors of others."""

from __future__ import annotations

from trainer.backends.fsdp2 import FSDP2Engine
from trainer.testing import TrainEngineContract


class TestFSDP2(TrainEngineContract):
    make_engine = FSDP2Engine
