"""What each row of a batch asks of sampling, and parameters of rows as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig
from inference_server.backends.embedded.device import Device
from inference_server.backends.embedded.grammar import GrammarState


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of a batch."""

    config: SamplingConfig
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    """Tokens sampled so far, for penalties and `min_new_tokens`."""
    stop_ids: Sequence[int] = ()
    """Tokens that must not be sampled before `min_new_tokens`."""
    reports_mask: bool = False
    """Report the tokens that are left to draw from, if some are cut."""
    grammar: GrammarState | None = None
    """What the output has to follow."""


class Columns:
    """Tensors of the host, until they are sent together."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns


def send_together(device: Device, *parts: Columns | None) -> None:
    """Send the columns of the parts that there are, in one copy."""
    there = [part for part in parts if part is not None]
    sent = iter(device.send([column for part in there for column in part.columns]))
    for part in there:
        part.columns = tuple(next(sent) for _ in part.columns)
