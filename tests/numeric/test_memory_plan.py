"""The memory that a process will take, against numbers computed by hand and what autograd keeps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from headway.contracts.config.model import LoraConfig, ModelConfig, TrainedModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig, ServerConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.errors import ConfigError
from headway.runtime.memory_plan import GIB, MemoryPlan
from inference_server import default_dtype
from inference_server import memory as server_memory
from inference_server.memory import plan_server
from tests.numeric.engines import open_engine, random_batch
from trainer.memory import Planned, activation_bytes, check_memory, plan_rank
from trainer.topology import Topology
from weight_sync.model_dir import model_without_weights
from weight_sync.model_size import ModelSize, adapter_parameters, model_size

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Queries and output 8·8 each, keys and values 4·8 each, feed-forward 3·8·12, two norms of 8.
LAYER = 64 + 64 + 32 + 32 + 288 + 16
AROUND = 800 + 800 + 8
PARAMETERS = 2 * LAYER + AROUND
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def write(folder: Path, config: PretrainedConfig) -> Path:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llama"), LlamaConfig(**SHAPE))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """A GPU of some free bytes; what is logged."""

    def set_free(count: int) -> pytest.LogCaptureFixture:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (count, count))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
        for module in (server_memory, default_dtype):
            monkeypatch.setattr(module, "choose_device", lambda setting: CUDA)
        return caplog

    caplog.set_level(logging.INFO)
    return set_free


def test_a_model_is_measured_without_its_weights(llama: Path) -> None:
    size = model_size(model_without_weights(ModelConfig(path=str(llama))))
    assert size == ModelSize(
        parameters=PARAMETERS,
        largest_layer=LAYER,
        around=AROUND,
        layers=2,
        hidden=8,
        queries=8,
        keys=4,
        intermediate=12,
        vocabulary=100,
        max_context=512,
    )
    assert size.kv_width == 2 * 2 * 4


def test_one_rank_holds_all(llama: Path) -> None:
    planned = {"policy": Planned(TrainedModelConfig(path=str(llama)), is_trained=True)}
    plan = plan_rank(planned, TrainerConfig(max_tokens_per_mb=10, kept_logits_bytes=5), 1, CPU)
    assert plan.needed == {
        "policy weights": 4 * PARAMETERS,
        "policy gradients": 4 * PARAMETERS,
        "policy optimizer": 8 * PARAMETERS,
        "gathered layers": 0,
    }
    norms, heads = 2 * 8 * 12, (4 * 8 + 5 * 4) * 4 + 3 * 12 * 4
    assert plan.wanted == {
        "activations": 10 * 2 * (norms + heads + 4 * 12 * 4),
        "logits": 5 + 3 * 10 * 4096 * 4,
    }


def test_ranks_hold_a_part_and_gather_what_computes(llama: Path) -> None:
    policy = TrainedModelConfig(path=str(llama), dtype="float32", gradient_checkpointing=True)
    planned = {
        "policy": Planned(policy, is_trained=True),
        "reference": Planned(policy.model_copy(update={"dtype": "bfloat16"}), is_trained=False),
    }
    trainer = TrainerConfig(max_tokens_per_mb=10, shard_size=2, compute_dtype="bfloat16")
    plan = plan_rank(planned, trainer, 4, CUDA)
    half = PARAMETERS // 2
    assert plan.needed == {
        "policy weights": 4 * half,
        "policy gradients": 4 * half,
        "policy optimizer": 8 * half,
        "reference weights": 2 * half,
        "gathered layers": 2 * (AROUND + 2 * LAYER) + AROUND * (2 + 4),
    }
    of_layer = 2 * 8 * 10 + (4 * 8 + 5 * 4) * 2 + 3 * 12 * 4 + 4 * 12 * 2
    assert plan.wanted["activations"] == 10 * (2 * 8 * 2 + of_layer)


def test_adapters_alone_have_gradients(llama: Path) -> None:
    lora = LoraConfig(rank=3, target_modules=("q_proj", "down_proj"))
    model = TrainedModelConfig(path=str(llama), lora=lora)
    adapters = 2 * 3 * ((8 + 8) + (12 + 8))
    assert adapter_parameters(model_without_weights(model), 3, lora.target_modules) == adapters
    plan = plan_rank({"policy": Planned(model, is_trained=True)}, TrainerConfig(), 1, CPU)
    assert plan.needed["policy weights"] == 4 * (PARAMETERS + adapters)
    assert plan.needed["policy gradients"] == 4 * adapters
    assert plan.needed["policy optimizer"] == 8 * adapters


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autograd_keeps_less_than_the_bound_and_more_than_half(
    tmp_path: Path, kind: type[PretrainedConfig], dtype: str
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
    folder = write(tmp_path, kind(**{**SHAPE, **shape, "head_dim": 16}))
    engine = open_engine(folder, dtype=dtype)
    weights = {p.untyped_storage().data_ptr() for p in engine._model.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = random_batch(0, (32,) * 8)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine._model(lambda output: output.hidden.sum(), batch)
    seen = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    size = model_size(engine._model.model)
    bound = activation_bytes(size, getattr(torch, dtype).itemsize, batch.num_tokens, False)
    assert bound / 2 < seen <= bound


def test_a_server_holds_weights_cache_and_a_step(llama: Path) -> None:
    size = model_size(model_without_weights(ModelConfig(path=str(llama))))
    backend = EmbeddedTorchConfig(max_sequences=3, max_context=64, max_prefill_tokens=20)
    plan = plan_server(size, 2, backend)
    of_token = 4 * 8 + 3 * 8 + 4 * 4 + 3 * 12
    assert plan.needed == {
        "weights": 2 * PARAMETERS,
        "KV cache": 64 * 16 * 2,
        "step": 3 * 100 * (2 + 12) + 23 * of_token * 2,
    }
    assert plan.wanted == {"second copy for a swap": 2 * PARAMETERS}
    given = backend.model_copy(update={"kv_cache_bytes": 1 << 20})
    assert plan_server(size, 2, given).needed["KV cache"] == 1 << 20


def test_what_does_not_fit_is_refused_before_anything_is_loaded(llama: Path, on_gpu) -> None:
    on_gpu(1 << 10)
    planned = {"policy": Planned(TrainedModelConfig(path=str(llama)), is_trained=True)}
    with pytest.raises(
        ConfigError, match=r"rank 1, cuda:0: policy weights .* do not fit: use more"
    ):
        check_memory(planned, TrainerConfig(), Topology(1, 2, CUDA))
    config = ServerConfig(model=ModelConfig(path=str(llama)))
    with pytest.raises(ConfigError, match=r"memory of cuda:0: weights .* do not fit: use"):
        server_memory.check_memory(config)


def test_what_fits_is_told(llama: Path, on_gpu) -> None:
    logged = on_gpu(80 * GIB)
    server_memory.check_memory(ServerConfig(model=ModelConfig(path=str(llama))))
    planned = {"policy": Planned(TrainedModelConfig(path=str(llama)), is_trained=True)}
    check_memory(planned, TrainerConfig(), Topology(0, 1, CUDA))
    assert [message.split(":")[0] for message in logged.messages] == [
        "memory of cuda",
        "memory of rank 0, cuda",
    ]
    assert logged.messages[1].endswith(" of 80.00 GiB that are free")
    check_memory(planned, TrainerConfig(), Topology(0, 1, torch.device("cpu")))
    assert len(logged.messages) == 2


def test_bounds_that_may_not_fit_are_a_warning() -> None:
    plan = MemoryPlan({"weights": 3 * GIB, "optimizer": GIB}, {"activations": 2 * GIB})
    assert plan.describe(8 * GIB) == (
        "weights 3.00 + optimizer 1.00 + activations 2.00 = 6.00 of 8.00 GiB that are free"
    )
    assert "may run out" not in plan.check("cuda:0", 8 * GIB, "buy more")
    assert plan.check("cuda:0", 5 * GIB, "buy more").endswith("bounds of its settings: buy more")
    with pytest.raises(ConfigError, match=r"4\.00 GiB are needed at once and do not fit: buy more"):
        plan.check("cuda:0", 4 * GIB - 1, "buy more")
