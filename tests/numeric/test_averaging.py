"""A reference that follows the policy."""

from __future__ import annotations

import pytest
import torch

from trainer.algorithms.averaging import move_towards


@pytest.mark.parametrize(("eta", "expected"), [(0.0, 1.0), (0.25, 2.0), (1.0, 5.0)])
def test_the_target_moves_its_share_of_the_way(eta, expected):
    target, source = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for model, value in ((target, 1.0), (source, 5.0)):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
    move_towards(target.parameters(), source.parameters(), eta)
    assert all(bool((p == expected).all()) for p in target.parameters())
    assert all(bool((p == 5.0).all()) for p in source.parameters())


def test_a_share_above_one_and_another_model_are_refused():
    with pytest.raises(ValueError, match="wanted a share"):
        move_towards([], [], 1.5)
    with pytest.raises(ValueError, match="shorter"):
        move_towards([torch.zeros(1), torch.zeros(1)], [torch.zeros(1)], 0.5)
