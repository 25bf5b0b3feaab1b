"""A model that is loaded part by part is the one that is loaded whole, in a share of the memory."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from headway.contracts.config.model import LoraConfig
from headway.contracts.errors import ConfigError
from tests.numeric.engines import TRAINER, assert_close, open_engine, parameters_of
from tests.numeric.models import save_model
from tests.numeric.ranks import run_ranks
from trainer.backends.loading import build_without_parameters
from trainer.topology import Topology

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
MIB = 2**20
M_MMAP_THRESHOLD = -3  # malloc.h
LORA = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))
# Options of the model by case; the first word is the directory.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in bfloat16": {"dtype": "bfloat16"},
    "llama from scratch": {"init_from_scratch": True, "seed": 5},
    "llama with a fresh head": {"head": "value", "seed": 3},
    "llama with adapters": {"lora": LORA, "seed": 7},
    "llama with both": {"lora": LORA, "head": "value"},
    "qwen3": {},  # tied
    "qwen3 with adapters": {"lora": LORA},
    "gpt2": {},
    "body": {"head": "value"},
    "pieces": {},
    "bin": {},  # as older models are stored
    "mixtral": {},  # stored expert by expert, held together
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "qwen3", "gpt2"):
        save_model(root / kind, kind)
    AutoModel.from_pretrained(root / "llama").save_pretrained(root / "body")
    model = AutoModelForCausalLM.from_pretrained(root / "llama")
    model.save_pretrained(root / "pieces", max_shard_size="20KB")
    model.config.save_pretrained(root / "bin")
    torch.save(model.state_dict(), root / "bin" / "pytorch_model.bin")
    save_experts(root / "mixtral")
    return root


def save_experts(folder: Path) -> None:
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(folder)


def load_all(topology: Topology, root: Path, shard_size: int | None) -> dict[str, Any]:
    trainer = TRAINER.model_copy(update={"shard_size": shard_size})
    loaded = {}
    for name, options in CASES.items():
        folder = root / name.partition(" ")[0]
        engine = open_engine(folder, topology=topology, trainer=trainer, **options)
        buffers = {n: b.clone() for n, b in engine._model.model.named_buffers()}
        trained = [n for n, p in engine._model.model.named_parameters() if p.requires_grad]
        loaded[name] = parameters_of(engine), buffers, trained, engine._model._is_plain
    return loaded


@pytest.fixture(scope="module")
def whole(root) -> dict[str, Any]:
    return load_all(Topology(0, 1, torch.device("cpu")), root, None)


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, None), (4, 2)], ids=str)
def test_every_mesh_loads_the_bits_of_one_process(root, whole, tmp_path, world_size, shard_size):
    for rank in run_ranks(world_size, tmp_path, load_all, root, shard_size):
        for name, (parameters, buffers, *rest) in whole.items():
            assert_close(rank[name][0], parameters, atol=0.0)
            assert rank[name][1].keys() == buffers.keys()
            assert all(torch.equal(rank[name][1][n], b) for n, b in buffers.items())
            assert [p.dtype for p in rank[name][0].values()] == [
                p.dtype for p in parameters.values()
            ]
            assert list(rank[name][2:]) == rest, name


def test_what_is_built_without_parameters_holds_none_and_draws_nothing(root):
    state = torch.get_rng_state()
    model = build_without_parameters(open_config(root / "qwen3"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {b.device.type for b in model.buffers()} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), state)


def open_config(folder: Path):
    return open_engine(folder)._model_config


BIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=24,
    num_attention_heads=6,
    num_key_value_heads=6,
)


def peak_growth(act: Callable[[], Any]) -> int:
    """Bytes that a call adds to this process's resident memory at its highest, over those before."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset here
    kept = act()
    growth = resident("VmHWM") - before
    del kept
    return growth


def resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def measure_loading(topology: Topology, small: Path, big: Path) -> int:
    # What is freed goes back at once: only what is held counts.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**15)
    open_engine(small, topology=topology)  # imports, groups, buffers of gloo
    return peak_growth(lambda: open_engine(big, topology=topology))


@pytest.mark.parametrize(("world_size", "share"), [(2, 0.8), (4, 0.55)])
def test_no_rank_ever_holds_a_whole_model(root, tmp_path, world_size, share):
    big = tmp_path / "big"
    model = LlamaForCausalLM(BIG)
    model.save_pretrained(big)
    whole = sum(p.nbytes for p in model.parameters())
    assert whole > 200 * MIB
    peaks = run_ranks(world_size, tmp_path / "ranks", measure_loading, root / "llama", big)
    assert max(peaks) < share * whole, [peak / whole for peak in peaks]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model-00002-of-*.safetensors", cut, r"00002-of-\d+\.safetensors is damaged"),
        ("model-00002-of-*.safetensors", Path.unlink, r"00002-of-\d+\.safetensors is missing"),
        ("*.index.json", cut, r"model\.safetensors\.index\.json is damaged"),
    ],
    ids=["cut_off", "missing", "index_cut_off"],
)
def test_damaged_files_are_named(root, tmp_path, file, damage, message):
    folder = tmp_path / "pieces"
    model = AutoModelForCausalLM.from_pretrained(root / "pieces")
    model.save_pretrained(folder, max_shard_size="20KB")
    (found,) = folder.glob(file)
    damage(found)
    with pytest.raises(ConfigError, match=message):
        open_engine(folder)
    for answer in run_ranks(2, tmp_path / "ranks", refusal, folder):
        assert re.search(rf"{message}|the first rank could not load the model", answer)


def refusal(topology: Topology, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_engine(folder, topology=topology)
    return str(caught.value)


def test_a_configuration_of_another_shape_is_refused(root, tmp_path):
    folder = save_model(tmp_path / "llama", "llama")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"hidden_size": 64}))
    with pytest.raises(ConfigError, match="cannot load a model"):
        open_engine(folder)
    first, second = run_ranks(2, tmp_path / "ranks", refusal, folder)
    assert "cannot load a model" in first
    assert "the first rank could not load the model" in second
