"""Rollouts that ask for sampling masks: wherever sampling cuts, and nowhere else."""

from __future__ import annotations

import pytest

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import RolloutsFailed

CUT = SamplingConfig(max_new_tokens=4, top_p=0.9)


@pytest.mark.parametrize(
    ("gconfig", "asks", "has_mask"),
    [(CUT, True, True), (SamplingConfig(max_new_tokens=4), True, False), (CUT, False, False)],
    ids=["cut", "whole", "not asked"],
)
async def test_a_trajectory_has_the_mask_of_what_was_cut(open_service, gconfig, asks, has_mask):
    asked = []

    async def answer(req, attempt):
        asked.append(req.sampling_mask)
        return [7, 8]

    bench = await open_service(answer)
    await bench.submit("a", gconfig=gconfig, sampling_mask=asks)
    (group,) = await bench.wait(1)
    (row,) = group.trajectories
    assert asked == [has_mask]
    assert (row.sampling_mask is not None) == has_mask
    if has_mask:
        assert row.sampling_mask.counts.tolist() == row.loss_mask.astype(int).tolist()
        assert row.sampling_mask.tokens.tolist() == [7, 8]


async def test_a_server_that_reports_no_mask_fails_the_rollout(open_service):
    bench = await open_service(error_budget=9)
    bench.generator.reports_masks = False
    await bench.submit("a", gconfig=CUT, sampling_mask=True)
    with pytest.raises(RolloutsFailed, match=r"algorithm\.sampling_mask=ignore"):
        await bench.wait(1, "d1", rollout_ids=("a",))
