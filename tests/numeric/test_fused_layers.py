"""Layers of Llama and its kin: what the server and the trainer compute on a CPU against the modules."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from inference_server.backends.embedded.attention import Span, StepTokens
from inference_server.backends.embedded.fused_forward import can_fuse
from inference_server.backends.embedded.model import EmbeddedModel
from inference_server.backends.embedded.slab_decode import decode_order
from tests.numeric.models import SPREAD, VOCAB_SIZE, save_model
from trainer.backends import fused_layers
from trainer.backends.fused_layers import fuse_layers
from trainer.backends.packed_attention import NAME, PackedLayout, register

LENGTHS = (5, 11, 3)
KINDS = ("llama", "qwen2", "qwen3", "sliding")


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    if request.param != "qwen2":
        return save_model(place, request.param)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=SPREAD,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they begin as zeros
                parameter.normal_()
    model.save_pretrained(place)
    return place


def step_logits(folder, pack_weights, dtype, steps=40):
    """[steps, rows, V] of rows that decode behind prompts of different lengths, in no order."""
    config = ModelConfig(path=str(folder), dtype=dtype)
    model = EmbeddedModel(config, pack_weights, max_context=None)
    cache, runner = model.make_runner(EmbeddedTorchConfig(max_sequences=4))
    generator = torch.Generator().manual_seed(0)
    found = []
    with model.device.decoding():
        rows = []
        for length in LENGTHS:
            ids = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
            rows.append(cache.allocate(128))
            span = Span(rows[-1], 0, length, 0)
            tokens = StepTokens(ids, range(length), [length - 1], [span], [0.5])
            found.append(runner.run(tokens)[0].float())
            rows[-1].length = length
        rows = [rows[2], rows[0], rows[1]]
        for _ in range(steps):
            spans = [Span(row, row.length, row.length + 1, at) for at, row in enumerate(rows)]
            ids = torch.randint(VOCAB_SIZE, (len(rows),), generator=generator).tolist()
            starts = [span.start for span in spans]
            assert decode_order(spans) == [1, 2, 0]
            tokens = StepTokens(ids, starts, range(len(rows)), spans, [0.5] * 3)
            found.append(runner.run(tokens)[0].float())
            for row in rows:
                row.length += 1
    return model, torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "bound", "has_kernel"),
    [
        ("float32", 1e-5, True),
        ("bfloat16", 0.05, torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        ("bfloat16", 0.05, False),
        ("float16", 0.01, False),
    ],
)
def test_a_fused_forward_gives_the_logits_of_the_modules(
    folder, dtype, bound, has_kernel, monkeypatch
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_kernel)
    model, fused = step_logits(folder, True, dtype)
    assert can_fuse(model.module)
    packed = {product.packed.weight.dtype for product in model._packed._products}
    assert packed == {getattr(torch, dtype) if has_kernel else torch.float32}
    _, plain = step_logits(folder, False, dtype)
    assert (fused - plain).abs().max() < bound * plain.abs().max()


def test_rows_that_do_not_all_decode_have_no_order(folder):
    model = EmbeddedModel(ModelConfig(path=str(folder)), True, max_context=None)
    cache, _ = model.make_runner(EmbeddedTorchConfig(max_sequences=4))
    with model.device.decoding():
        rows = [cache.allocate(8), cache.allocate(8), cache.allocate(90)]
    singles = [Span(row, 4, 5, at) for at, row in enumerate(rows)]
    assert decode_order(singles) == [0, 1, 2]
    assert decode_order(singles[::-1]) == [0, 2, 1]
    assert decode_order(singles[1:]) is None
    assert decode_order([Span(rows[0], 0, 2, 0), *singles[1:]]) is None


def test_norms_and_rotations_have_the_derivatives_of_what_they_compute():
    torch.manual_seed(0)
    x = torch.randn(1, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: fused_layers._RMSNorm.apply(x, w, 1e-6), (x, weight)
    )
    angles = torch.randn(1, 5, 1, 4, dtype=torch.float64).repeat(1, 1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    assert torch.autograd.gradcheck(lambda x: fused_layers._Rotation.apply(x, cos, sin), (x,))


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM])
def test_fused_layers_have_the_gradients_of_the_modules(kind):
    torch.manual_seed(0)
    config = kind.config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=SPREAD,
    )
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # norms of ones would hide a factor
    register()
    model.set_attn_implementation(NAME)
    plain = losses_and_gradients(model)
    fuse_layers(model.model.layers)
    assert all("forward" in vars(layer.self_attn) for layer in model.model.layers)
    fused = losses_and_gradients(model)
    assert fused.keys() == plain.keys()
    for name, value in fused.items():
        assert (value - plain[name]).abs().max() < 2e-5 * plain[name].abs().max()


def losses_and_gradients(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    layout = PackedLayout(LENGTHS, torch.device("cpu"))
    logits = model(ids, position_ids=positions, use_cache=False, packed_layout=layout).logits
    loss = torch.log_softmax(logits, -1)[0, :-1].gather(1, ids[0, 1:, None]).sum()
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}
