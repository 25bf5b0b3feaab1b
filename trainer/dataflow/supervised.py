"""The dataflow of experiments on rows: their columns, what a reference says of them, and an update."""

from __future__ import annotations

from headway.contracts.config.experiment import DPOExperiment, RWExperiment, SFTExperiment
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import POLICY, REFERENCE

ROWS = "rows"
"""The call that brings a batch."""
COLUMNS = ("input_ids", "labels", "loss_mask")
"""What every batch of rows holds; see `pack_examples`."""


def sft_flow(config: SFTExperiment) -> Dataflow:
    """Demonstrations, and the update from them."""
    rows = Call(ROWS, "data", "demonstrations", (), COLUMNS)
    return Dataflow((rows, Call("sft_train", "train_step", "sft", COLUMNS, (), POLICY)))


def rw_flow(config: RWExperiment) -> Dataflow:
    """Pairs, with a margin where it is asked for, and the update from them."""
    margin = () if config.data.margin_key is None else ("margin",)
    rows = Call(ROWS, "data", "pairs", (), (*COLUMNS, *margin))
    return Dataflow(
        (rows, Call("rw_train", "train_step", "rw", ("input_ids", *margin), (), POLICY))
    )


def dpo_flow(config: DPOExperiment) -> Dataflow:
    """Pairs, what the reference says of them, and the update from both."""
    asked, adds = POLICY if is_own_base(config) else REFERENCE, ("reference_logprobs",)
    return Dataflow(
        (
            Call(ROWS, "data", "pairs", (), COLUMNS),
            Call("ref_inf", "inference", "dpo", COLUMNS, adds, asked),
            Call("dpo_train", "train_step", "dpo", (*COLUMNS, *adds), (), POLICY),
        )
    )


def is_own_base(config: DPOExperiment) -> bool:
    """Whether the reference is the policy without its adapters, so that no second copy is held."""
    return config.model.lora is not None and config.reference is None
