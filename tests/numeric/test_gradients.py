"""The norm of gradients against exact sums, whatever their number, size, type and place."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.numeric.ranks import run_ranks
from trainer.backends.gradients import CHUNK, clip_gradients, sum_of_squares
from trainer.topology import Topology


def clip(parameters, max_norm: float, over=lambda squares: squares) -> float:
    """The norm before, of squares that are summed over the shards."""
    norm = math.sqrt(over(float(sum_of_squares(parameters))))
    clip_gradients(parameters, max_norm, norm)
    return norm


def parameters_with(*gradients: torch.Tensor | None) -> list[torch.nn.Parameter]:
    parameters = []
    for gradient in gradients:
        shape, dtype = ((3,), None) if gradient is None else (gradient.shape, gradient.dtype)
        parameters.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        parameters[-1].grad = gradient
    return parameters


def exact_norm(*gradients: torch.Tensor) -> float:
    return math.sqrt(math.fsum(x * x for g in gradients for x in g.flatten().double().tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_of_all_elements_and_gradients_shrink_to_the_bound(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (3,), (0, 4), ()]
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    gradients.append(gradients[0].clone().t())  # as it lies in memory it is not in order
    norm = exact_norm(*gradients)
    before = [gradient.clone() for gradient in gradients]
    parameters = parameters_with(*gradients, None)
    assert clip(parameters, 2 * norm) == pytest.approx(norm, rel=1e-15)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=False))
    assert clip(parameters, 0.5) == pytest.approx(norm, rel=1e-15)
    for parameter, gradient in zip(parameters, before, strict=False):
        expected = gradient * (0.5 / (norm + 1e-6))
        torch.testing.assert_close(
            parameter.grad, expected, rtol=1e-2 if dtype.itemsize == 2 else 0, atol=0
        )
    assert parameters[-1].grad is None
    assert clip([], 1.0) == 0.0


def test_many_elements_lose_no_digits():
    """Of a few millions, a sum in float32 has lost the fourth or fifth digit."""
    gradient = torch.randn(4 * CHUNK + 3, generator=torch.Generator().manual_seed(0))
    expected = float(gradient.double().square().sum().sqrt())
    assert clip(parameters_with(gradient), 1e9) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_told_and_left(value):
    gradient = torch.tensor([1.0, value, 2.0])
    norm = clip(parameters_with(gradient), 1.0)
    assert norm == pytest.approx(value, nan_ok=True)
    assert gradient.tolist() == pytest.approx([1.0, value, 2.0], nan_ok=True)


def test_squares_above_float32_are_none_above_float64():
    gradient = torch.full((4,), 1e30)
    assert clip(parameters_with(gradient), 1.0) == pytest.approx(2e30, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0.5] * 4, rel=1e-6)


def clip_shards(topology: Topology, rows: int) -> tuple[float, torch.Tensor]:
    """The norm, and the gradient whole, of one that lies in shards."""
    mesh = init_device_mesh("cpu", (rows, topology.world_size // rows))
    whole = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    placements = [Replicate(), Shard(0)]
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, placements))
    parameter.grad = distribute_tensor(whole, mesh, placements)
    norm = clip([parameter], 1.0, lambda value: topology.sum([value])[0] / rows)
    assert isinstance(parameter.grad, DTensor)
    return norm, parameter.grad.full_tensor()


@pytest.mark.extended
@pytest.mark.parametrize("rows", [1, 2])
def test_shards_make_one_vector_and_copies_count_once(tmp_path, rows):
    whole = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    norm = exact_norm(whole)
    for got, clipped in run_ranks(4, tmp_path, clip_shards, rows):
        assert got == pytest.approx(norm, rel=1e-15)
        torch.testing.assert_close(clipped, whole / (norm + 1e-6), rtol=1e-6, atol=0)
