"""Weights & Biases: a run below `run_dir/wandb`, sent on by the package's own process.

`WANDB_API_KEY`, `WANDB_BASE_URL` and `WANDB_MODE=offline` (then `wandb sync run_dir/wandb/offline-run-*`)
are read from the environment, by the package.
"""

from __future__ import annotations

import logging

import wandb

from trainer.tracking.base import Metrics, RunDescription
from trainer.tracking.groups import histograms, scalars

FINISH_S = 120.0
"""Longest wait at the end for what was not sent yet; it stays in the folder, for `wandb sync`."""


class WandbSink:
    """One run, however often it is resumed.

    Its curves go over `step` and not over the number of the call, which must grow: a resumed run may
    write a step once more.
    """

    def __init__(self, description: RunDescription) -> None:
        settings = description.settings
        logging.getLogger("wandb").propagate = False  # it has a log of its own in the folder
        self._run = wandb.init(
            project=settings.project,
            name=description.name,
            id=description.run_id,
            resume="allow",
            tags=list(settings.tags),
            dir=str(description.folder),
            config={**description.config, "lineage": dict(description.lineage)},
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                finish_timeout=FINISH_S,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: Metrics) -> None:
        shown = {
            name: wandb.Histogram(np_histogram=(counts, _edges(counts)))
            for name, counts in histograms(metrics)
        }
        self._run.log({"step": int(metrics["step"]), **dict(scalars(metrics)), **shown})

    def close(self) -> None:
        self._run.finish()


def _edges(counts: list[int]) -> list[float]:
    """Return the edges of the bins of whole numbers."""
    return [value - 0.5 for value in range(len(counts) + 1)]
