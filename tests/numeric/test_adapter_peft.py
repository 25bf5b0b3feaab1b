"""Merged adapters against `peft` itself, and what it loads of a published one."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from headway.contracts.config.weight_sync import DiskSync
from weight_sync.adapter import make_adapter, merge_adapter
from weight_sync.manifest import Base
from weight_sync.transports.base import make_publisher

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # read by peft 0.21
)
TARGETS = ["q_proj", "v_proj", "down_proj"]
TOKENS = torch.arange(12).reshape(2, 6)


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(params=[False, True], ids=["alpha/r", "alpha/sqrt(r)"])
def lora(request) -> LoraConfig:
    return LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=TARGETS,
        use_rslora=request.param,
        task_type="CAUSAL_LM",
    )


@pytest.fixture
def adapted(lora) -> PeftModel:
    """Both halves of every pair are random: `peft` begins with B = 0."""
    model = get_peft_model(make_llama(), lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model


def adapter_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


@torch.no_grad()
def test_the_merged_model_computes_what_peft_computes(adapted, lora):
    plain = make_llama()
    base = weights_of(plain)
    shapes = {name: tensor.shape for name, tensor in base.items()}
    before = plain(TOKENS).logits
    merged = merge_adapter(
        adapter_tensors(adapted), make_adapter(lora.to_dict()), base.__getitem__, shapes
    )
    plain.load_state_dict(merged, strict=True)
    wanted, found = adapted(TOKENS).logits, plain(TOKENS).logits
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    changed = {name for name in base if not merged[name].equal(base[name])}
    assert changed == {name for name in base if name.split(".")[-2] in TARGETS}


@torch.no_grad()
def test_merged_weights_are_those_of_peft(adapted, lora):
    base = weights_of(make_llama())
    shapes = {name: tensor.shape for name, tensor in base.items()}
    tensors = adapter_tensors(adapted)
    merged = merge_adapter(tensors, make_adapter(lora.to_dict()), base.__getitem__, shapes)
    wanted = weights_of(adapted.merge_and_unload())
    assert merged.keys() == wanted.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_peft_loads_a_published_adapter_as_it_lies(adapted, lora, tmp_path: Path):
    publisher = make_publisher(DiskSync(root=str(tmp_path)))
    first = publisher.publish(1, make_llama().named_parameters())
    assert first.digest is not None
    meta = publisher.publish_adapter(
        2,
        adapter_tensors(adapted).items(),
        make_adapter(lora.to_dict()),
        Base(version=1, digest=first.digest),
    )
    publisher.close()
    loaded = PeftModel.from_pretrained(make_llama(), meta.path).eval()
    assert loaded(TOKENS).logits.equal(adapted(TOKENS).logits)
