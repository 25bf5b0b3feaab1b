"""Sharded checkpoints of model, optimizer and schedule: they load on another number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.optim.lr_scheduler import LRScheduler

from trainer.backends.state_writer import accept_no_group, reason
from trainer.backends.stored_state import check_stored, damaged


@dataclass(frozen=True, slots=True)
class TrainState:
    """State that training changes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    is_single: bool
    """One process, which needs no group."""
    notes: dict[str, Any]
    """Plain values that are saved beside; `load` replaces them."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold it; None is the default group."""

    def tree(self, with_optim: bool) -> dict[str, Any]:
        """The parameters that are trained, and what belongs to them; collective.

        Tensors are those of the model and the optimizer, not copies.
        """
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

    def load(self, path: str, with_optim: bool) -> None:
        """Restore a tree that was stored; collective.

        Raises:
            ConfigError: it is missing, or of another model; nothing was loaded.
            StateError: it is damaged; nothing was loaded if files are missing or truncated.
        """
        state = self.tree(with_optim)
        check_stored(path, state)
        if self.is_single:
            accept_no_group()
        try:
            load_state(state, checkpoint_id=path, process_group=self.group, no_dist=self.is_single)
        except (CheckpointException, OSError, RuntimeError, ValueError, UnpicklingError) as error:
            raise damaged(path, reason(error)) from error
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
