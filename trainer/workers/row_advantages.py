"""The driver's part of a step: scores -> advantages, with the same functions as everywhere."""

from __future__ import annotations

import torch

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.errors import DataError
from trainer.algorithms.batch_advantages import Metrics, compute_advantages
from trainer.workers.data_proto import DataProto
from trainer.workers.padding import to_responses, to_sequences

GROUP = "uid"
"""The column of objects that siblings of a prompt share."""


def row_advantages(
    algorithm: AlgorithmConfig, batch: DataProto, kl_coef: float | None = None
) -> tuple[DataProto, Metrics]:
    """Add the columns that the updates need, as configured.

    Args:
        batch: of `to_sequences`, with `scores` [B], objects `uid`, and the models' columns
            (`trainer.algorithms.batch_advantages.compute_advantages`); `truncated` [B] bool if there.
        kl_coef: of the penalty in the rewards; None is `algorithm.kl_coef`.
    Returns:
        The batch with `advantages` [B, R]; `returns` where there are values; `response_mask` without what
        is left out of the loss. And metrics.
    """
    if GROUP not in batch.objects:
        raise DataError(f"the batch has no objects {GROUP!r}, which say which rows are siblings")
    packed = to_sequences(batch)
    repeats = torch.tensor(packed.lengths)

    def spread(column: torch.Tensor) -> torch.Tensor:
        return column.repeat_interleave(repeats)

    firsts: dict[object, int] = {}
    groups = [firsts.setdefault(name, row) for row, name in enumerate(batch[GROUP].tolist())]
    everywhere = torch.zeros(len(batch), dtype=torch.bool)
    packed = packed.with_columns(
        scores=spread(batch["scores"]),
        group=spread(torch.tensor(groups)),
        truncated=spread(batch.tensors.get("truncated", everywhere)),
        is_sample=spread(~everywhere),
    )
    if "behaviour_logprobs" not in packed.columns:
        if algorithm.decoupled:
            raise DataError(
                "algorithm.decoupled needs the sampling policy's logprobs; give rollout_log_probs, or "
                "set decoupled=false"
            )
        packed = packed.with_columns(behaviour_logprobs=packed["proximal_logprobs"])
    coef = algorithm.kl_coef if kl_coef is None else kl_coef
    credited, metrics = compute_advantages(algorithm, packed, 0, coef)
    names = [name for name in ("advantages", "returns") if name in credited.columns]
    columns = {name: credited[name] for name in names}
    columns["response_mask"] = credited["loss_mask"].to(torch.int64)
    return batch.with_columns(**to_responses(batch, columns)), metrics
