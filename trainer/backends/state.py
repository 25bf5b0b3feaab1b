"""Sharded checkpoints of model, optimizer and schedule: they load on another number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.optim.lr_scheduler import LRScheduler

from headway.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrainState:
    """What training changes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    is_single: bool
    """One process, which needs no group."""
    notes: dict[str, Any]
    """Plain values that are saved beside; `load` replaces them."""

    def save(self, path: str, with_optim: bool) -> None:
        """Write the parameters that are trained, and what belongs to them; collective."""
        with _quiet_about_no_group():
            save_state(self._dict(with_optim), checkpoint_id=path, no_dist=self.is_single)

    def load(self, path: str, with_optim: bool) -> None:
        """Restore what `save` wrote; collective.

        Raises:
            ConfigError: it is missing, or of another model.
        """
        state = self._dict(with_optim)
        try:
            _refuse_more(path, state["model"])
            with _quiet_about_no_group():
                load_state(state, checkpoint_id=path, no_dist=self.is_single)
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"checkpoint {path} does not fit the model: {error}") from error
        set_state_dict(
            self.model,
            [self.optimizer] if with_optim else [],
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
        if with_optim:
            self.scheduler.load_state_dict(state["scheduler"])
        self.notes.update(state.get("notes", {}))

    def _dict(self, with_optim: bool) -> dict[str, Any]:
        model, optimizer = get_state_dict(
            self.model,
            [self.optimizer] if with_optim else [],
            options=StateDictOptions(ignore_frozen_params=True),
        )
        state: dict[str, Any] = {"model": model}
        if self.notes:
            state["notes"] = dict(self.notes)
        if with_optim:
            state |= {"optimizer": optimizer, "scheduler": self.scheduler.state_dict()}
        return state


def _refuse_more(path: str, wanted: Mapping[str, Any]) -> None:
    """Raise if a checkpoint holds parameters that the model has not: loading would leave them out."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    extra = [n for n in stored if n.startswith("model.") and n.removeprefix("model.") not in wanted]
    if extra:
        raise ValueError(f"it also holds {sorted(extra)[:3]}")


@contextmanager
def _quiet_about_no_group() -> Iterator[None]:
    """One process without a group is what we mean; torch warns that it might not be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
