"""Adapters as versions: what a server ends up with, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.contracts.config.weight_sync import (
    DiskSync,
    PublishConfig,
    ReceiverConfig,
    SharedMemorySync,
)
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.contract.weight_channel_suite import refusal
from weight_sync.adapter import make_adapter, merge_adapter, merge_weight
from weight_sync.deadline import Deadline
from weight_sync.manifest import Adapter, Base
from weight_sync.receiver import Receiver
from weight_sync.transports.base import make_publisher

CONFIG = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "target_modules": ["q_proj", "up_proj"]}
SHAPES = {
    "model.embed.weight": torch.Size([16, 8]),
    "model.layers.0.q_proj.weight": torch.Size([12, 8]),
    "model.layers.0.up_proj.weight": torch.Size([8, 12]),
    "model.norm.weight": torch.Size([8]),
}
ADAPTED = ("model.layers.0.q_proj", "model.layers.0.up_proj")


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def lora(seed: int, rank: int = 4, prefix: str = "base_model.model.") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in ADAPTED:
        rows, columns = SHAPES[f"{module}.weight"]
        tensors[f"{prefix}{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"{prefix}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return tensors


def merged(base, adapter, config=CONFIG):
    return merge_adapter(adapter, make_adapter(config), base.__getitem__, SHAPES)


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(left[name].dtype == right[name].dtype for name in left)
    assert all(left[name].equal(right[name]) for name in left)


@pytest.fixture(params=["disk", "shared_memory"])
def config(request, tmp_path: Path) -> PublishConfig:
    kinds = {"disk": DiskSync, "shared_memory": SharedMemorySync}
    return kinds[request.param](root=str(tmp_path / "weights"), keep=1)


@pytest.fixture
def publisher(config):
    publisher = make_publisher(config)
    yield publisher
    publisher.close()


def make_receiver(config, tmp_path: Path) -> Receiver:
    return Receiver(ReceiverConfig(allow=(config.origin,), cache_dir=str(tmp_path / "cache")))


@pytest.fixture
def receiver(config, tmp_path):
    receiver = make_receiver(config, tmp_path)
    yield receiver
    receiver.close()


def stage(receiver, meta):
    return receiver.within(Deadline(10.0)).stage(meta, SHAPES)


def verify(receiver, meta):
    return receiver.within(Deadline(10.0)).verify(meta, SHAPES)


def base_of(meta: WeightUpdateMeta) -> Base:
    assert meta.digest is not None
    return Base(version=meta.version, digest=meta.digest)


def remove(meta: WeightUpdateMeta) -> None:
    shutil.rmtree(meta.path.removeprefix("shm://"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_stabilized", [False, True])
def test_a_merge_is_the_formula_in_float64_rounded(dtype, is_stabilized):
    base, adapter = model(1, dtype), lora(2)
    found = merged(base, adapter, CONFIG | {"use_rslora": is_stabilized})
    scale = 8 / 2 if is_stabilized else 8 / 4
    for module in ADAPTED:
        a = adapter[f"base_model.model.{module}.lora_A.weight"].double()
        b = adapter[f"base_model.model.{module}.lora_B.weight"].double()
        wanted = base[f"{module}.weight"].double() + scale * (b @ a)
        assert found[f"{module}.weight"].dtype == dtype
        torch.testing.assert_close(found[f"{module}.weight"], wanted.to(dtype))


def test_modules_without_an_adapter_are_the_base_itself():
    base = model(1)
    found = merged(base, lora(2))
    assert list(found) == list(SHAPES)
    assert found["model.norm.weight"] is base["model.norm.weight"]
    assert found["model.embed.weight"] is base["model.embed.weight"]


def test_merged_bits_depend_neither_on_threads_nor_on_layout():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(300, 517, generator=generator).bfloat16()
    a = torch.randn(7, 517, generator=generator)
    b = torch.randn(300, 7, generator=generator)
    rows = [merge_weight(weight[i : i + 1], a, b[i : i + 1], 1.7) for i in range(300)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert merge_weight(weight, a, b, 1.7).equal(torch.cat(rows))
            transposed = merge_weight(weight.t().contiguous().t(), a, b.t().contiguous().t(), 1.7)
            assert transposed.equal(torch.cat(rows))
    finally:
        torch.set_num_threads(threads)


MERGE = """
import torch
from weight_sync.adapter import merge_weight
from weight_sync.manifest import tensor_checksum
generator = torch.Generator().manual_seed(3)
weight, a, b = (torch.randint(-999, 999, s, generator=generator) / 997 for s in SHAPES)
print(torch.backends.cpu.get_cpu_capability(), tensor_checksum(merge_weight(weight, a, b, 1.7)))
"""


def test_merged_bits_do_not_depend_on_the_instructions_of_the_processor():
    program = MERGE.replace("SHAPES", "((300, 517), (7, 517), (300, 7))")
    found = {}
    for capability in ("default", "avx2"):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-c", program]
        printed = subprocess.check_output(command, env=environment, text=True, timeout=60)
        used, checksum = printed.split()
        found[used] = checksum
    assert len(set(found.values())) == 1, found


def test_full_then_adapters_then_full(publisher, receiver):
    first = publisher.publish(1, model(1).items())
    receiver.keep(stage(receiver, first))
    for version in (2, 3):
        meta = publisher.publish_adapter(
            version, lora(version).items(), make_adapter(CONFIG), base_of(first)
        )
        staged = stage(receiver, meta)
        assert (staged.version, staged.digest) == (version, meta.digest)
        assert_equal(dict(staged.tensors), merged(model(1), lora(version)))
        receiver.keep(staged)
        assert publisher.collect(version) == ([2] if version == 3 else [])  # never the base
    last = publisher.publish(4, model(4).items())
    receiver.keep(stage(receiver, last))
    assert_equal(dict(receiver.held(4).tensors), model(4))
    assert publisher.collect(4) == [1, 3]


def test_a_server_that_joins_late_fetches_the_base(publisher, config, tmp_path):
    base = base_of(publisher.publish(1, model(1).items()))
    metas = [
        publisher.publish_adapter(v, lora(v).items(), make_adapter(CONFIG), base) for v in (2, 3)
    ]
    receiver = make_receiver(config, tmp_path)
    for meta in metas:
        staged = stage(receiver, meta)
        assert_equal(dict(staged.tensors), merged(model(1), lora(meta.version)))
        receiver.keep(staged)
        assert receiver.base(base) is not None


def test_an_engine_gets_the_merged_model_as_a_folder(publisher, receiver):
    first = publisher.publish(1, model(1).items())
    receiver.keep(verify(receiver, first))
    for version in range(2, 6):
        meta = publisher.publish_adapter(
            version, lora(version).items(), make_adapter(CONFIG), base_of(first)
        )
        proven = verify(receiver, meta)
        assert (proven.version, proven.digest) == (version, meta.digest)
        files = sorted(proven.folder.glob("*.safetensors"))
        found = {name: t for file in files for name, t in load_file(file).items()}
        assert_equal(found, merged(model(1), lora(version)))
        receiver.keep(proven)
        assert receiver.base(base_of(first)) is not None
        assert len(list(proven.folder.parent.glob("v*"))) <= 3


def test_a_cache_believes_nothing_that_an_earlier_process_left(publisher, config, tmp_path):
    base = base_of(publisher.publish(1, model(1).items()))
    meta = publisher.publish_adapter(2, lora(2).items(), make_adapter(CONFIG), base)
    stale = tmp_path / "cache" / "v00000002"
    stale.mkdir(parents=True)
    (stale / "manifest.json").write_text("{}")
    receiver = make_receiver(config, tmp_path)
    proven = verify(receiver, meta)
    assert proven.folder == stale.resolve()
    assert json.loads((stale / "manifest.json").read_text())["version"] == 2
    receiver.close()


def test_deltas_go_on_behind_adapters(tmp_path):
    config = DiskSync(root=str(tmp_path / "weights"), keep=1, delta={"full_every": 4})
    publisher, receiver = make_publisher(config), make_receiver(config, tmp_path)
    first = publisher.publish(1, model(1).items())
    receiver.keep(stage(receiver, first))
    publisher.announce(2)  # as a delta: then it turns out to be an adapter
    meta = publisher.publish_adapter(2, lora(2).items(), make_adapter(CONFIG), base_of(first))
    receiver.keep(stage(receiver, meta))
    publisher.collect(2)
    changed = model(1)
    changed["model.norm.weight"][0] += 1
    meta = publisher.publish(3, changed.items())
    assert_equal(dict(stage(receiver, meta).tensors), changed)
    onto_delta = publisher.publish_adapter(4, lora(4).items(), make_adapter(CONFIG), base_of(meta))
    assert_equal(dict(stage(receiver, onto_delta).tensors), merged(changed, lora(4)))
    assert publisher.collect(4) == [2]
    publisher.close()


def test_the_directory_is_what_peft_saves(publisher):
    first = publisher.publish(1, model(1).items())
    adapter = Adapter(rank=4, alpha=8.0)
    meta = publisher.publish_adapter(2, lora(2, prefix="").items(), adapter, base_of(first))
    folder = Path(meta.path.removeprefix("shm://"))
    assert_equal(load_file(folder / "adapter_model.safetensors"), lora(2))
    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 8)
    assert written["target_modules"] == ["q_proj", "up_proj"]


def test_the_digest_covers_base_and_scale(publisher):
    bases = [base_of(publisher.publish(v, model(v).items())) for v in (1, 2)]
    configs = [CONFIG, CONFIG, CONFIG | {"use_rslora": True}, CONFIG | {"lora_alpha": 4}]
    digests = set()
    for config, base in zip(configs, [*bases, bases[0], bases[0]], strict=True):
        meta = publisher.publish_adapter(3, lora(3).items(), make_adapter(config), base)
        digests.add(meta.digest)
        remove(meta)
    assert len(digests) == len(configs)


@pytest.mark.parametrize(
    ("version", "digest"), [(0, "0" * 64), (1, "0" * 64)], ids=["absent", "another digest"]
)
def test_a_base_that_is_not_there_is_refused_before_anything_is_written(publisher, version, digest):
    publisher.publish(1, model(1).items())
    base = Base(version=version, digest=digest)
    with pytest.raises(SyncError, match="publish that version whole first"):
        publisher.publish_adapter(2, lora(2).items(), make_adapter(CONFIG), base)
    assert publisher.latest() == 1


def test_an_adapter_on_an_adapter_is_refused(publisher):
    first = base_of(publisher.publish(1, model(1).items()))
    second = base_of(publisher.publish_adapter(2, lora(2).items(), make_adapter(CONFIG), first))
    with pytest.raises(SyncError, match="name its base, version 1"):
        publisher.publish_adapter(3, lora(3).items(), make_adapter(CONFIG), second)


def test_a_base_with_other_weights_is_refused_by_the_server(publisher, receiver, config):
    full = publisher.publish(1, model(1).items())
    meta = publisher.publish_adapter(2, lora(2).items(), make_adapter(CONFIG), base_of(full))
    remove(full)
    other = publisher.publish(1, model(9).items())
    receiver.keep(stage(receiver, other))
    with pytest.raises(SyncError, match="has the digest"):
        stage(receiver, meta)
    remove(other)
    with pytest.raises(SyncError, match="there is no version at"):
        stage(receiver, meta)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"base_model.model.{ADAPTED[0]}.lora_B.weight"),
            "lora_B.weight is missing",
        ),
        (
            lambda t: t.pop(f"base_model.model.{ADAPTED[1]}.lora_A.weight"),
            "lora_A.weight is missing",
        ),
        (lambda t: t.update(lora(2, rank=3)), "its rank is declared as 4"),
        (lambda t: t.update({"model.norm.bias": torch.ones(2)}), "is no matrix of an adapter"),
        (
            lambda t: t.update({f"{ADAPTED[0]}.lora_magnitude_vector": torch.ones(12)}),
            "is no matrix of an adapter",
        ),
    ],
    ids=["no B", "no A", "rank", "bias", "magnitude"],
)
def test_what_is_no_adapter_is_refused_before_anything_is_written(publisher, change, message):
    first = base_of(publisher.publish(1, model(1).items()))
    tensors = lora(2)
    change(tensors)
    with pytest.raises(SyncError, match=message):
        publisher.publish_adapter(2, tensors.items(), make_adapter(CONFIG), first)
    assert publisher.latest() == 1


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {
                "model.other.lora_A.weight": torch.ones(4, 8),
                "model.other.lora_B.weight": torch.ones(9, 4),
            },
            "changes model.other.weight, which the model does not have",
        ),
        (
            {
                "model.layers.0.q_proj.lora_A.weight": torch.ones(4, 12),
                "model.layers.0.q_proj.lora_B.weight": torch.ones(8, 4),
            },
            r"makes \(8, 12\), the model has \(12, 8\)",
        ),
    ],
    ids=["unknown module", "transposed"],
)
def test_an_adapter_of_another_model_is_refused_by_the_server(
    publisher, receiver, tensors, message
):
    first = base_of(publisher.publish(1, model(1).items()))
    meta = publisher.publish_adapter(2, tensors.items(), make_adapter(CONFIG), first)
    with pytest.raises(SyncError, match=message):
        stage(receiver, meta)


@pytest.mark.parametrize(
    "variant",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"peft_type": "LOHA"},
        {"init_lora_weights": "pissa"},
        {"a_setting_of_the_future": 1},
    ],
    ids=lambda variant: next(iter(variant)),
)
def test_variants_that_change_the_formula_are_refused_by_name(variant):
    with pytest.raises(SyncError, match=next(iter(variant))):
        make_adapter(CONFIG | variant)


def test_a_configuration_that_contradicts_the_manifest_is_refused():
    with pytest.raises(SyncError, match="its configuration has r=4"):
        merge_adapter(lora(1), Adapter(rank=2, alpha=8.0, config=CONFIG), model(1).get, SHAPES)


def test_a_refused_adapter_leaves_nothing(publisher):
    first = base_of(publisher.publish(1, model(1).items()))
    publisher.announce(2, first)
    publisher.follow(2, refusal("nobody is there"))
    with pytest.raises(SyncError, match="nobody is there"):
        publisher.publish_adapter(2, lora(2).items(), make_adapter(CONFIG), first)
    assert publisher.latest() == 1


def test_without_a_model_to_hold_it_against_the_base_says_what_there_is(publisher, receiver):
    first = publisher.publish(1, model(1).items())
    meta = publisher.publish_adapter(2, lora(2).items(), make_adapter(CONFIG), base_of(first))
    staged = receiver.within(Deadline(10.0)).stage(meta, {})
    assert_equal(dict(staged.tensors), merged(model(1), lora(2)))
    receiver.keep(verify(receiver, first))
    staged = receiver.within(Deadline(10.0)).stage(meta, {})
    assert_equal(dict(staged.tensors), merged(model(1), lora(2)))
