"""Log-probabilities without logits: equal to the plain formula, in values and in gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.algorithms import logprobs
from trainer.algorithms.logprobs import chunked_logprobs, chunked_top, token_logprobs

T, V, H = 13, 29, 6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, the last one partly filled."""
    monkeypatch.setattr(logprobs, "VOCABULARY_TILE", 8)


def head_inputs(dtype: torch.dtype = torch.float64, size: float = 2.0) -> tuple[Tensor, ...]:
    """hidden, weight, bias (all leaves) and labels."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(dtype).requires_grad_()

    return leaf(T, H), leaf(V, H), leaf(V), torch.randint(V, (T,), generator=generator)


def by_full_logits(hidden, weight, labels, temperature, bias):
    """Log-probabilities and entropies through [T, V], in the type of the inputs."""
    logits = hidden @ weight.t() + (0.0 if bias is None else bias)
    log_p = (logits / (temperature or 1.0)).log_softmax(1)
    return log_p[torch.arange(len(labels)), labels], -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 1024])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_values_and_gradients_equal_those_of_full_logits(chunk_tokens, temperature, has_bias):
    hidden, weight, bias, labels = head_inputs()
    leaves = [hidden, weight, bias] if has_bias else [hidden, weight]
    given = bias if has_bias else None
    got = chunked_logprobs(hidden, weight, labels, temperature, chunk_tokens, given, True)
    expected = by_full_logits(hidden, weight, labels, temperature, given)
    mix = torch.randn(2, T, dtype=torch.float64)
    for of_logprobs, of_entropy in [(1, 0), (0, 1), (1, 1)]:
        losses = [
            (of_logprobs * mix[0] * logprob + of_entropy * mix[1] * entropy).sum()
            for logprob, entropy in (got, expected)
        ]
        torch.testing.assert_close(losses[0], losses[1])
        grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses]
        torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
def test_several_tokens_of_a_position_are_as_many_labels(with_entropy):
    hidden, weight, bias, labels = head_inputs()
    several = torch.stack([labels, (labels + 7) % V, (labels + 20) % V, labels], dim=1)
    got = chunked_logprobs(hidden, weight, several, 0.6, 5, bias, with_entropy)
    one_by_one = [
        chunked_logprobs(hidden, weight, each, 0.6, 5, bias, with_entropy)
        for each in several.unbind(1)
    ]
    expected = torch.stack([logprobs for logprobs, _ in one_by_one], dim=1)
    torch.testing.assert_close(got[0], expected)
    torch.testing.assert_close(
        token_logprobs(hidden.float() @ weight.float().t() + bias, several, 0.6),
        expected.float(),
        rtol=1e-4,
        atol=1e-4,
    )
    mix = torch.randn(T, 4, dtype=torch.float64)
    losses = [(mix * logprobs).sum() for logprobs in (got[0], expected)]
    if with_entropy:
        losses = [losses[0] + got[1].sum(), losses[1] + one_by_one[0][1].sum()]
    grads = [torch.autograd.grad(loss, (hidden, weight, bias)) for loss in losses]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("count", [1, 5, 11, V])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_the_likeliest_tokens_are_found_over_tiles(count, has_bias, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 5)
    hidden, weight, bias, _ = head_inputs()
    given = bias if has_bias else None
    logits = hidden @ weight.t() + (0.0 if given is None else given)
    expected, ids = (logits / 0.6).log_softmax(1).topk(count)
    found, got = chunked_top(hidden, weight, count, 0.6, given)
    torch.testing.assert_close(got, expected)
    assert found.tolist() == ids.tolist()


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
def test_gradients_equal_finite_differences(with_entropy):
    hidden, weight, bias, labels = head_inputs(size=0.7)

    def outputs(hidden, weight, bias):
        both = chunked_logprobs(hidden, weight, labels, 0.8, 5, bias, with_entropy)
        return both if with_entropy else both[0]

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("kept_bytes", [0, 300, 2000, 1 << 20], ids=["none", "one", "some", "all"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
def test_kept_logits_change_no_bit(kept_bytes, with_entropy):
    """Of values and gradients, in two backward passes."""
    leaves = head_inputs(torch.float32)
    results = []
    for kept in (0, kept_bytes):
        *inputs, labels = leaves
        hidden, weight, bias = inputs
        values = chunked_logprobs(hidden, weight, labels, 0.6, 5, bias, with_entropy, kept)
        loss = sum(value.square().sum() for value in values if value is not None)
        first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
        results.append([loss, *first, *second])
    for plain, kept in zip(*results, strict=True):
        assert torch.equal(plain, kept)


def test_no_more_logits_are_kept_than_there_is_room_for():
    hidden, weight, _, labels = head_inputs(torch.float32)

    def held_bytes(kept_bytes):
        held = []
        with torch.autograd.graph.saved_tensors_hooks(held.append, lambda _: None):
            chunked_logprobs(hidden, weight, labels, chunk_tokens=5, kept_bytes=kept_bytes)
        return sum(tensor.nbytes for tensor in held)

    none, whole = held_bytes(0), T * V * 4
    assert 0 < held_bytes(whole // 2) - none <= whole // 2
    assert held_bytes(whole) - none == whole
    with torch.no_grad():
        assert held_bytes(whole) == 0


def test_one_output_alone_may_be_differentiated():
    hidden, weight, _, labels = head_inputs()
    for which in (0, 1):
        got = chunked_logprobs(hidden, weight, labels, with_entropy=True)[which]
        expected = by_full_logits(hidden, weight, labels, 1.0, None)[which]
        grads = [torch.autograd.grad(values.sum(), [hidden, weight]) for values in (got, expected)]
        torch.testing.assert_close(grads[0], grads[1])


def test_float32_against_a_slow_loop_in_float64():
    hidden, weight, bias, labels = head_inputs(torch.float32)
    got, entropies = chunked_logprobs(hidden, weight, labels, 0.7, 4, bias, True)
    plain = token_logprobs(hidden @ weight.t() + bias, labels, 0.7)
    assert got.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(got, plain, atol=2e-5, rtol=1e-5)
    for t in range(T):
        logits = [
            (math.fsum(h * w for h, w in zip(hidden[t].tolist(), row, strict=True)) + b) / 0.7
            for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
        ]
        peak = max(logits)
        norm = peak + math.log(math.fsum(math.exp(z - peak) for z in logits))
        assert got[t].item() == pytest.approx(logits[labels[t]] - norm, abs=2e-5)
        entropy = -math.fsum(math.exp(z - norm) * (z - norm) for z in logits)
        assert entropies[t].item() == pytest.approx(entropy, abs=2e-5)


def test_bfloat16_inputs_are_summed_in_float32():
    hidden, weight, bias, labels = head_inputs(torch.bfloat16)
    got, entropies = chunked_logprobs(hidden, weight, labels, 1.0, 4, bias, True)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    expected = by_full_logits(exact[0], exact[1], labels, 1.0, exact[2])
    assert got.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close((got.double(), entropies.double()), expected, atol=1e-5, rtol=1e-5)
    (got.sum() + entropies.sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for leaf, reference in zip((hidden, weight, bias), exact, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        # One rounding of the whole sum, to the nearest of 8 significant bits.
        torch.testing.assert_close(leaf.grad.double(), reference.grad, atol=1e-6, rtol=2**-8)


def test_a_half_hidden_state_meets_a_float32_head():
    hidden, weight, _, labels = head_inputs(torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    got, _ = chunked_logprobs(half, weight, labels)
    got.sum().backward()
    assert half.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(got, token_logprobs(half.float() @ weight.t(), labels))


def test_a_tied_weight_gets_the_gradients_of_both_uses():
    _, weight, _, labels = head_inputs()
    mixer = torch.randn(H, H, dtype=torch.float64)

    def loss(logprobs_of):
        hidden = torch.tanh(weight[labels.flip(0)] @ mixer)
        return logprobs_of(hidden).sum()

    chunked = loss(lambda hidden: chunked_logprobs(hidden, weight, labels, 0.9, 4)[0])
    full = loss(lambda hidden: by_full_logits(hidden, weight, labels, 0.9, None)[0])
    grads = [torch.autograd.grad(value, weight)[0] for value in (chunked, full)]
    torch.testing.assert_close(grads[0], grads[1])


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, bias, labels = head_inputs()
    frozen = weight.detach(), bias.detach()
    chunked_logprobs(hidden, frozen[0], labels, bias=frozen[1])[0].sum().backward()
    expected = by_full_logits(hidden.detach().requires_grad_(), weight, labels, 1.0, bias)
    assert hidden.grad is not None
    assert frozen[0].grad is None
    with torch.no_grad():
        without = chunked_logprobs(hidden, weight, labels, bias=bias)[0]
    assert not without.requires_grad
    torch.testing.assert_close(without, expected[0].detach())


def test_extreme_logits_stay_finite():
    hidden, weight, _, labels = head_inputs(torch.float32, size=60.0)
    values = chunked_logprobs(hidden, weight, labels, 0.3, 4, with_entropy=True)
    assert all(torch.isfinite(value).all() for value in values)
    assert (values[0] <= 0).all()
    (values[0].sum() + values[1].sum()).backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_no_tokens_give_no_logprobs_and_zero_gradients():
    hidden, weight, _, _ = head_inputs()
    none = hidden[:0].detach().requires_grad_()
    values, entropies = chunked_logprobs(
        none, weight, torch.zeros(0, dtype=torch.int64), with_entropy=True
    )
    (values.sum() + entropies.sum()).backward()
    assert values.shape == entropies.shape == (0,)
    assert none.grad.shape == (0, H)
    assert not weight.grad.any()


def test_a_label_outside_of_the_vocabulary_is_not_a_number():
    hidden, weight, _, labels = head_inputs()
    labels[3], labels[5] = -100, V
    got, _ = chunked_logprobs(hidden, weight, labels)
    assert got.isnan().nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 4), (7, 5), (3,)), r"hidden \(3, 4\), weight \(7, 5\).*wanted"),
        (((3, 4), (7, 4), (2,)), r"labels \(2,\).*wanted"),
        (((1, 3, 4), (7, 4), (3,)), r"hidden \(1, 3, 4\).*wanted \[T, H\]"),
    ],
    ids=["hidden_size", "labels", "batched"],
)
def test_other_shapes_are_refused(shapes, message):
    hidden, weight, labels = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(hidden, weight, labels.long())


def test_chunks_and_biases_are_checked():
    hidden, weight, bias, labels = head_inputs()
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        chunked_logprobs(hidden, weight, labels, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"bias \(28,\), wanted \[V\] = \(29,\)"):
        chunked_logprobs(hidden, weight, labels, bias=bias[1:])


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(with_entropy):
    """The largest result of any operation is the gradient of the weight."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(640, 4, requires_grad=True)
    labels = torch.zeros(64, dtype=torch.int64)
    with Largest() as largest:
        values = chunked_logprobs(hidden, weight, labels, 0.5, 16, None, with_entropy)
        sum(value.sum() for value in values if value is not None).backward()
    assert largest.elements == weight.numel()
