"""What an optimizer holds moves to another device and back, and steps are as if it had stayed."""

from __future__ import annotations

import pytest
import torch

from tests.numeric.engines import open_engine
from tests.numeric.models import save_model
from trainer.backends.offload import move_optimizer, move_parameters


def test_state_and_parameters_come_back_as_they_were():
    cpu, other = torch.device("cpu"), torch.device("meta")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    kept = {id(p): {n: t.clone() for n, t in optimizer.state[p].items()} for p in parameters}
    move_optimizer(optimizer, cpu)
    move_parameters(model, cpu)
    assert list(model.parameters()) == parameters
    assert all(p.grad is None for p in parameters)
    for parameter in parameters:
        for name, tensor in optimizer.state[parameter].items():
            assert torch.equal(tensor, kept[id(parameter)][name])
    move_optimizer(optimizer, other)
    assert {t.device.type for p in parameters for t in optimizer.state[p].values()} == {"meta"}


@pytest.mark.parametrize("kind", ["parameters", "optimizer"])
def test_nothing_moves_on_the_cpu(kind: str, tmp_path):
    engine = open_engine(save_model(tmp_path, "llama"))
    before = [p.data_ptr() for p in engine._model.parameters()]
    engine.place_on_device(**{"parameters": True, "optimizer": True, kind: False})
    assert [p.data_ptr() for p in engine._model.parameters()] == before
