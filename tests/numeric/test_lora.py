"""Adapters: only they train, they go out alone where that is possible, and merged elsewhere."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from headway.contracts.config.model import LoraConfig
from headway.contracts.config.weight_sync import CollectiveSync, DiskSync, ReceiverConfig
from headway.contracts.errors import ConfigError
from tests.numeric.engines import (
    assert_close,
    open_engine,
    parameters_of,
    plain_training,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.models import load_reference, save_model
from tests.numeric.ranks import run_ranks
from trainer.api import LossOutput, MicroBatchSpec, SaveLoadMeta
from trainer.backends.lora import ADAPTER_FOLDER
from trainer.batching.balance import partition_by_tokens
from trainer.topology import Topology
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.transports.base import make_publisher

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # read by peft 0.21
)
TARGETS = ("q_proj", "v_proj", "down_proj")
LORA = LoraConfig(rank=4, alpha=12, target_modules=TARGETS)
SPEC = MicroBatchSpec(25)
STEPS = 3
TOKENS = torch.arange(12).reshape(2, 6)


def open_lora(folder: Path, lora: LoraConfig = LORA, **options):
    return open_engine(folder, lora=lora, **options)


def train(engine, steps, share=lambda batch: batch):
    metrics = []
    for seed in steps:
        mine = share(random_batch(seed))
        metrics.append(engine.train_batch(mine, SPEC, token_loss, tokens_in_loss))
        engine.step_lr_scheduler()
    return metrics


def merged(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine._upload.parameters()}


def adapters(engine) -> dict[str, torch.Tensor]:
    return {name: p for name, p in parameters_of(engine).items() if ".lora_" in name}


def logprobs(engine):
    return engine.forward(
        random_batch(9), SPEC, post_hook=lambda out, batch: out.logprobs(batch["labels"])
    )


def test_adapters_train_as_in_a_plain_loop_with_peft(llama_dir):
    engine = open_lora(llama_dir)
    torch.testing.assert_close(logprobs(engine), logprobs(open_engine(llama_dir)))
    options = PeftConfig(r=4, lora_alpha=12, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(load_reference(llama_dir), options).eval()
    ours = adapters(engine)
    theirs = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    assert {f"base_model.model.{name}" for name in ours} == theirs.keys()
    with torch.no_grad():
        for name, tensor in ours.items():
            theirs[f"base_model.model.{name}"].copy_(tensor)
    plain = plain_training(model, [random_batch(seed) for seed in range(STEPS)])
    metrics = train(engine, range(STEPS))
    assert [f["loss"] for f in metrics] == pytest.approx(plain["losses"], rel=1e-5)
    assert [f["grad_norm"] for f in metrics] == pytest.approx(plain["norms"], rel=1e-5)
    trained = {f"base_model.model.{name}": p for name, p in parameters_of(engine).items()}
    assert_close(trained, plain["parameters"], atol=1e-6)
    with torch.no_grad():
        expected = dict(model.merge_and_unload().named_parameters())
    assert_close(merged(engine), expected, atol=1e-6)


def test_without_adapters_a_model_is_its_base_and_trains_on_as_before(llama_dir):
    plain = open_engine(llama_dir)
    assert_passes(plain, logprobs(plain))
    asked, never_asked = open_lora(llama_dir), open_lora(llama_dir)
    for step in range(STEPS):
        assert_passes(asked, logprobs(plain))
        train(asked, [step])
        train(never_asked, [step])
    assert_passes(asked, logprobs(plain))
    assert not torch.allclose(logprobs(asked), logprobs(plain))
    assert_close(parameters_of(asked), parameters_of(never_asked), atol=0.0)


def assert_passes(engine, expected):
    """What it says without adapters, bit by bit."""
    with engine.without_adapters():
        assert torch.equal(logprobs(engine), expected)


def test_only_adapters_and_a_scalar_head_move(llama_dir):
    engine = open_lora(llama_dir, head="value")
    before = parameters_of(engine)

    def loss(output, batch):
        return LossOutput((output.values() * batch["advantages"]).mean())

    engine.train_batch(random_batch(0), SPEC, loss, tokens_in_loss)
    moved = {n for n, p in parameters_of(engine).items() if not torch.equal(p, before[n])}
    assert moved == adapters(engine).keys() | {"score.weight"}


def receive(root: Path, meta, folder: Path) -> dict[str, torch.Tensor]:
    shapes = {name: p.shape for name, p in load_reference(folder).named_parameters()}
    receiver = make_receiver(ReceiverConfig(allow=(str(root),)))
    return dict(receiver.within(Deadline(30.0)).stage(meta, shapes).tensors)


def publish(engine, publisher, version: int):
    meta = publisher.announce(version)
    engine.upload_weights(meta)
    return meta


def kinds(root: Path) -> list[bool]:
    """Per version, whether it is an adapter."""
    folders = sorted(entry for entry in root.iterdir() if entry.name.startswith("v"))
    return [(folder / "adapter_config.json").is_file() for folder in folders]


def test_a_store_gets_the_base_and_then_adapters_which_servers_merge_to_the_same_bits(
    llama_dir, tmp_path
):
    with closing(make_publisher(DiskSync(root=str(tmp_path)))) as publisher:
        engine = open_lora(llama_dir, publisher=publisher)
        assert publisher.latest() == 0
        for version in (1, 2):
            train(engine, [version])
            meta = publish(engine, publisher, version)
            got = receive(tmp_path, meta, llama_dir)
            assert_close(got, merged(engine), atol=0.0)
    assert kinds(tmp_path) == [False, True, True]


def test_a_resumed_run_goes_on_with_its_base_and_its_numbers(llama_dir, tmp_path):
    saved = SaveLoadMeta(str(tmp_path / "saved"))
    root = tmp_path / "weights"
    uninterrupted = open_lora(llama_dir)
    train(uninterrupted, range(4))
    with closing(make_publisher(DiskSync(root=str(root)))) as publisher:
        first = open_lora(llama_dir, publisher=publisher)
        train(first, range(2))
        first.save(saved)
    with closing(make_publisher(DiskSync(root=str(root)))) as publisher:
        resumed = open_lora(llama_dir, publisher=publisher, seed=99)
        resumed.load(saved)
        train(resumed, range(2, 4))
        assert_close(parameters_of(resumed), parameters_of(uninterrupted), atol=0.0)
        publish(resumed, publisher, 3)
    assert kinds(root) == [False, True]
    stored = FileSystemReader(saved.path).read_metadata().state_dict_metadata
    held = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    assert held == adapters(resumed).keys()  # the base lies at model.path


def test_a_store_in_use_by_another_run_gets_whole_versions(llama_dir, tmp_path):
    with closing(make_publisher(DiskSync(root=str(tmp_path)))) as publisher:
        publisher.publish(4, [("weight", torch.ones(2))])
        engine = open_lora(llama_dir, publisher=publisher)
        train(engine, range(1))
        meta = publish(engine, publisher, 5)
        assert_close(receive(tmp_path, meta, llama_dir), merged(engine), atol=0.0)
    assert kinds(tmp_path) == [False, False]


def test_a_store_of_8_bits_and_a_process_group_get_no_adapters(llama_dir, tmp_path):
    rounding = DiskSync(root=str(tmp_path), quantization="int8")
    for config in (rounding, CollectiveSync()):
        with closing(make_publisher(config)) as publisher:
            open_lora(llama_dir, publisher=publisher)
            assert publisher.latest() is None


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_export_holds_the_merged_model_and_the_adapter_for_peft(tmp_path, kind):
    source = save_model(tmp_path / "source", kind)
    engine = open_lora(source)
    train(engine, range(1))
    engine.save(SaveLoadMeta(str(tmp_path / "out"), weight_format="hf"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    got = {name: p.detach() for name, p in exported.named_parameters()}
    assert_close(got, merged(engine), atol=0.0)
    adapted = PeftModel.from_pretrained(load_reference(source), tmp_path / "out" / ADAPTER_FOLDER)
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(TOKENS).logits, exported.eval()(TOKENS).logits)


@pytest.mark.parametrize(("stored", "wanted"), [(None, LORA), (LORA, None)])
def test_a_checkpoint_with_and_one_without_adapters_do_not_fit(llama_dir, tmp_path, stored, wanted):
    open_engine(llama_dir, lora=stored).save(SaveLoadMeta(str(tmp_path / "saved")))
    engine = open_engine(llama_dir, lora=wanted)
    before = parameters_of(engine)
    with pytest.raises(ConfigError, match="does not fit the model"):
        engine.load(SaveLoadMeta(str(tmp_path / "saved")))
    assert_close(parameters_of(engine), before, atol=0.0)


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("llama", ("nowhere",), "are not in this model"),
        ("llama", ("q_proj", "lm_head"), "matches lm_head"),
        ("qwen3", ("embed_tokens",), r"matches model\.embed_tokens, a Embedding"),
        ("gpt2", ("c_attn",), "a Conv1D; only linear"),
    ],
)
def test_modules_that_cannot_have_an_adapter_are_refused(tmp_path, kind, targets, message):
    folder = save_model(tmp_path / kind, kind)
    with pytest.raises(ConfigError, match=message):
        open_lora(folder, LORA.model_copy(update={"target_modules": targets}))


def test_dropout_is_drawn_for_training_alone_and_again_alike(llama_dir):
    lora = LORA.model_copy(update={"dropout": 0.5})
    one, same, without = (
        open_lora(llama_dir, lora),
        open_lora(llama_dir, lora),
        open_lora(llama_dir),
    )
    train(one, range(2))
    assert torch.equal(logprobs(one), logprobs(one))
    state = torch.get_rng_state()
    train(same, range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(parameters_of(same), parameters_of(one), atol=0.0)
    train(without, range(2))
    assert any(not torch.equal(a, adapters(one)[n]) for n, a in adapters(without).items())


def drawn(topology: Topology, folder: Path) -> torch.Tensor:
    """What dropout makes of one and the same batch on a rank."""
    engine = open_lora(folder, LORA.model_copy(update={"dropout": 0.5}), topology=topology)
    seen = []
    layer = engine._model.model.get_submodule("model.layers.0.self_attn.q_proj").lora_dropout
    layer["default"].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    engine.train_batch(random_batch(0), MicroBatchSpec(10_000), token_loss, tokens_in_loss)
    return seen[0]


def train_rank(topology: Topology, folder: Path):
    engine = open_lora(folder, topology=topology)
    base = logprobs(engine)  # B is 0: adapters change nothing yet

    def share(batch):
        return batch.select(partition_by_tokens(batch.lengths, topology.world_size)[topology.rank])

    metrics = []
    for step in range(STEPS):
        with engine.without_adapters():  # also before the first step
            assert torch.equal(logprobs(engine), base)
        metrics += train(engine, [step], share)
    assert not torch.allclose(logprobs(engine), base)
    return metrics, merged(engine), drawn(topology, folder)


@pytest.mark.extended
def test_adapters_on_two_ranks_train_as_on_one_with_dropout_of_their_own(llama_dir, tmp_path):
    expected, parameters, _ = train_rank(Topology(0, 1, torch.device("cpu")), llama_dir)
    ranks = run_ranks(2, tmp_path, train_rank, llama_dir)
    for metrics, got, _ in ranks:
        for one, two in zip(expected, metrics, strict=True):
            assert two == pytest.approx(one, rel=1e-5, abs=1e-6)
        assert_close(got, parameters, atol=1e-6)
    assert not torch.equal(ranks[0][2], ranks[1][2])


def publish_and_resume(topology: Topology, folder: Path, scratch: Path) -> None:
    """Two runs, the second from the first one's checkpoint."""
    for version in (1, 2):
        publisher = None
        if topology.is_main:
            publisher = make_publisher(DiskSync(root=str(scratch / "weights")))
        engine = open_lora(folder, topology=topology, publisher=publisher)
        if version == 2:
            engine.load(SaveLoadMeta(str(scratch / "saved")))
        train(engine, [version], lambda batch: batch.select([topology.rank]))
        engine.upload_weights(None if publisher is None else publisher.announce(version))
        engine.save(SaveLoadMeta(str(scratch / "saved")))
        if publisher is not None:
            publisher.close()


@pytest.mark.extended
def test_a_run_on_two_ranks_goes_on_with_its_base(llama_dir, tmp_path):
    run_ranks(2, tmp_path / "ranks", publish_and_resume, llama_dir, tmp_path)
    assert kinds(tmp_path / "weights") == [False, True, True]
