"""What a head says of hidden states, and that it needs no whole logits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from headway.contracts.errors import ConfigError
from tests.numeric.engines import open_engine, random_batch, token_loss, tokens_in_loss
from tests.numeric.models import SPREAD, VOCAB_SIZE, load_reference, reference_logits, save_model
from trainer.api import MicroBatchSpec

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": SPREAD,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TEMPERATURE = 0.7
SPEC = MicroBatchSpec(20)


def save_odd_model(folder: Path, kind: str) -> Path:
    """Heads with a bias (phi), logits that are capped (nanochat) or scaled (granite)."""
    torch.manual_seed(0)
    if kind == "phi":
        model = PhiForCausalLM(PhiConfig(**SIZES))
        torch.nn.init.normal_(model.lm_head.bias)
    elif kind == "nanochat":
        model = NanoChatForCausalLM(NanoChatConfig(**SIZES, final_logit_softcapping=3.0))
    else:
        model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "phi", "nanochat", "granite"])
def any_model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save = save_model if request.param in ("llama", "qwen3", "gpt2") else save_odd_model
    return save(folder, request.param)


def test_logprobs_and_entropies_are_those_of_the_model_alone(any_model):
    batch = random_batch(0)
    engine = open_engine(any_model)
    forward = {
        "logprobs": lambda out, mb: out.logprobs(mb["labels"], TEMPERATURE),
        "with": lambda out, mb: torch.stack(
            out.logprobs_and_entropy(mb["labels"], TEMPERATURE), dim=1
        ),
    }
    got = {name: engine.forward(batch, SPEC, post_hook=hook) for name, hook in forward.items()}
    model = load_reference(any_model)
    tables = []
    with torch.no_grad():
        for ids in torch.split(batch["input_ids"], list(batch.lengths)):
            logits = reference_logits(model, ids.tolist()).double() / TEMPERATURE
            tables.append(logits.log_softmax(-1))
    table = torch.cat(tables)
    logprobs = table.gather(1, batch["labels"][:, None])[:, 0]
    expected = torch.stack([logprobs, -(table.exp() * table).sum(1)], dim=1).float()
    assert got["logprobs"].dtype == torch.float32
    torch.testing.assert_close(got["logprobs"], expected[:, 0], atol=5e-5, rtol=0)
    torch.testing.assert_close(got["with"], expected, atol=5e-5, rtol=0)


def test_positions_outside_of_the_mask_are_zero_and_change_no_gradient(any_model):
    batch, engine = random_batch(0), open_engine(any_model)
    mask = batch["loss_mask"]
    assert 0 < mask.sum() < len(mask)

    def judge(given):
        def hook(output, micro_batch):
            both = output.logprobs_and_entropy(micro_batch["labels"], TEMPERATURE, given)
            alone = output.logprobs(micro_batch["labels"], TEMPERATURE, given)
            torch.testing.assert_close(alone, both[0], atol=1e-6, rtol=0)
            return torch.stack(both, dim=1)

        values = engine._model(lambda output: hook(output, batch), batch)
        (values[mask] * torch.arange(1.0, 3.0)).sum().backward()
        gradients = {n: p.grad.clone() for n, p in engine._model.model.named_parameters()}
        engine._model.zero_grad()
        return values, gradients

    (whole, expected), (masked, got) = judge(None), judge(mask)
    torch.testing.assert_close(masked[mask], whole[mask], atol=1e-5, rtol=1e-5)
    assert not masked[~mask].any()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(got[name], gradient, atol=1e-5 * max(scale, 1.0), rtol=0)


def test_a_micro_batch_with_nothing_in_the_loss_has_gradients_of_zero(any_model):
    batch, engine = random_batch(0), open_engine(any_model)
    nothing = torch.zeros_like(batch["loss_mask"])
    values = engine._model(lambda out: out.logprobs(batch["labels"], 1.0, nothing), batch)
    values.sum().backward()
    assert not values.any()
    assert all(p.grad is not None and not p.grad.any() for p in engine._model.parameters())


def test_no_logits_exist_while_a_language_model_trains(llama_dir):
    engine = open_engine(llama_dir)
    called = []
    engine._model.model.lm_head.register_forward_hook(lambda *_: called.append(1))
    engine.train_batch(random_batch(0), SPEC, token_loss, tokens_in_loss)
    assert not called
    engine.forward(random_batch(0), SPEC)
    assert called


class RoundedOtherwise(torch.nn.Linear):
    """A product whose kernel depends on the number of dimensions, as it may on a GPU."""

    def forward(self, input):
        logits = super().forward(input)
        return logits if input.ndim == 2 else logits.nextafter(torch.full_like(logits, torch.inf))


def test_a_last_bit_makes_no_model_odd(llama_dir):
    model = open_engine(llama_dir)._model
    model.model.lm_head.__class__ = RoundedOtherwise
    model.try_head(torch.device("cpu"))
    assert model._is_plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cap_is_seen_where_logits_are_too_small_to_feel_it(tmp_path, dtype):
    torch.manual_seed(0)
    sizes = SIZES | {"initializer_range": 0.002}
    NanoChatForCausalLM(NanoChatConfig(**sizes, final_logit_softcapping=50.0)).save_pretrained(
        tmp_path
    )
    assert not open_engine(tmp_path, dtype=dtype)._model._is_plain


def test_values_of_halves_are_not_rounded_to_halves(llama_dir):
    engine = open_engine(llama_dir, head="value", dtype="bfloat16")
    values = engine.forward(random_batch(0), SPEC)
    assert values.dtype == torch.float32
    assert (values != values.bfloat16()).float().mean() > 0.9


def test_a_language_model_has_no_values(any_model):
    with pytest.raises(ConfigError, match=r"model\.head=value"):
        open_engine(any_model).forward(
            random_batch(0), SPEC, post_hook=lambda out, batch: out.values()
        )
