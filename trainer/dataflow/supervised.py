"""The dataflow of experiments on rows: their columns, a reference's logprobs of them, and an update.
Calls of the configuration are added, or take the place of the one of their name."""

from __future__ import annotations

from headway.contracts.config.experiment import (
    DPOExperiment,
    RWExperiment,
    SFTExperiment,
    SupervisedExperiment,
)
from headway.contracts.errors import ConfigError
from trainer.dataflow.call import Call, further_calls
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import POLICY, REFERENCE

ROWS = "rows"
"""The call that brings a batch."""
COLUMNS = ("input_ids", "labels", "loss_mask")
"""Columns that every batch of rows has; see `pack_examples`."""


def sft_flow(config: SFTExperiment) -> Dataflow:
    """Demonstrations, and the update from them."""
    rows = Call(ROWS, "data", "demonstrations", (), COLUMNS)
    return _flow(config, rows, Call("sft_train", "train_step", "sft", COLUMNS, (), POLICY))


def rw_flow(config: RWExperiment) -> Dataflow:
    """Pairs, with a margin where it is asked for, and the update from them."""
    margin = () if config.data.margin_key is None else ("margin",)
    rows = Call(ROWS, "data", "pairs", (), (*COLUMNS, *margin))
    reads = ("input_ids", *margin)
    return _flow(config, rows, Call("rw_train", "train_step", "rw", reads, (), POLICY))


def dpo_flow(config: DPOExperiment) -> Dataflow:
    """Return the calls for pairs: the rows, the reference's logprobs, and the update from both."""
    asked, adds = POLICY if config.has_base_reference else REFERENCE, ("reference_logprobs",)
    return _flow(
        config,
        Call(ROWS, "data", "pairs", (), COLUMNS),
        Call("ref_inf", "inference", "dpo", COLUMNS, adds, asked),
        Call("dpo_train", "train_step", "dpo", (*COLUMNS, *adds), (), POLICY),
    )


def _flow(config: SupervisedExperiment, *calls: Call) -> Dataflow:
    """Return the graph of an experiment's calls and those of its configuration.

    Raises:
        ConfigError: it does not close, or a call asks for what rows do not have.
    """
    for call in config.dataflow.calls:
        if call.kind == "generate" or call.name == ROWS or call.model not in (None, POLICY):
            raise ConfigError(
                f"call {call.name!r} (kind={call.kind}, model={call.model}) is none of an experiment on "
                f"rows, which come from {ROWS!r}; use kind=inference or train_step, and model={POLICY}"
            )
    further = further_calls(config.dataflow.calls)
    names = {call.name for call in further}
    return Dataflow((*(call for call in calls if call.name not in names), *further))
