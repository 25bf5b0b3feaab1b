"""TensorBoard: event files in `run_dir/tensorboard`, written through `torch.utils.tensorboard`."""

from __future__ import annotations

import json

import yaml
from torch.utils.tensorboard import SummaryWriter

from trainer.tracking.base import Metrics, RunDescription
from trainer.tracking.groups import histograms, scalars

FOLDER = "tensorboard"


class TensorBoardSink:
    """One event file for each start of the run; what a resumed run does again hides what was there."""

    def __init__(self, description: RunDescription) -> None:
        self._writer = SummaryWriter(
            str(description.folder / FOLDER), purge_step=description.first_step
        )
        config = yaml.safe_dump(dict(description.config), sort_keys=False, allow_unicode=True)
        lineage = json.dumps(description.lineage, indent=2)
        self._writer.add_text("config", f"```yaml\n{config}\n```", description.first_step)
        self._writer.add_text("lineage", f"```json\n{lineage}\n```", description.first_step)

    def write(self, metrics: Metrics) -> None:
        step = int(metrics["step"])
        for name, value in scalars(metrics):
            self._writer.add_scalar(name, value, step)
        for name, counts in histograms(metrics):
            self._add_histogram(name, counts, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add_histogram(self, name: str, counts: list[int], step: int) -> None:
        seen = [value for value, count in enumerate(counts) if count]
        self._writer.add_histogram_raw(
            name,
            min=seen[0],
            max=seen[-1],
            num=sum(counts),
            sum=sum(value * count for value, count in enumerate(counts)),
            sum_squares=sum(value**2 * count for value, count in enumerate(counts)),
            bucket_limits=[value + 0.5 for value in range(len(counts))],
            bucket_counts=counts,
            global_step=step,
        )
