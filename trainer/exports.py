"""Trained models of a running experiment as Hugging Face directories: `exports/step-00000020/model`.

An export gets its name once all of it is there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from headway.contracts.config.frequency import ExportConfig
from trainer.api import SaveLoadMeta
from trainer.checkpoint import StoredModel
from trainer.timetable import Timetable
from trainer.topology import Topology

_NAME = re.compile(r"step-(\d{8,})")


class Exports:
    """The exports of a run folder, the oldest of which may be deleted."""

    def __init__(
        self, run_dir: Path, config: ExportConfig, topology: Topology, steps_per_epoch: int
    ) -> None:
        self._root = run_dir / "exports"
        self._keep = config.keep
        self._topology = topology
        self._timetable = Timetable(config, steps_per_epoch, topology)

    def after_step(self, step: int, models: Mapping[str, StoredModel]) -> None:
        """Export the models if that is due after `step` steps; collective."""
        if not self._timetable.is_due(step):
            return
        folder = self._root / f"step-{step:08d}"
        staging = self._root / f".{folder.name}.staging"
        if self._topology.is_main:
            shutil.rmtree(staging, ignore_errors=True)  # what a crash left
            staging.mkdir(parents=True)
        self._topology.barrier()
        for name, engine in models.items():
            engine.save(SaveLoadMeta(str(staging / name), weight_format="hf")).result()
        self._topology.barrier()  # models may be on different ranks
        if self._topology.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that went back to an earlier step
            staging.rename(folder)
            self._delete_old()

    def _delete_old(self) -> None:
        if self._keep is None:
            return
        found = sorted(f for f in self._root.iterdir() if _NAME.fullmatch(f.name))
        for folder in found[: -self._keep]:
            shutil.rmtree(folder)
