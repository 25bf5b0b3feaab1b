"""Model directories that were made to break who opens them: tokenizer, template, configuration, weights.

Each is refused by an error of ours, within seconds and a few MiB, and runs none of its code.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import ConfigError, ServiceError
from headway.contracts.types import Prompt, WeightUpdateMeta
from headway.text.tokenizer import TextTokenizer
from tests.integration.conftest import model_dir  # noqa: F401 - a fixture
from weight_sync.checkpoint import checkpoint_shapes
from weight_sync.model_dir import load_model, model_without_weights
from weight_sync.receiver import make_receiver
from weight_sync.transports.model_dir import INDEX_NAME, ModelDirReader

pytestmark = pytest.mark.extended

MAX_GROWTH_KIB = 256 << 10
LIMIT_S = 20.0
HUGE = 2 << 30
SHARD = "model.safetensors"
FIRST = "model.embed_tokens.weight"
CHAT = Prompt(group_id="g", messages=({"role": "user", "content": "1"},))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, model_dir: Path) -> Path:  # noqa: F811
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


@pytest.fixture
def bounded() -> Iterator[None]:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
    assert time.process_time() - began < LIMIT_S


@pytest.fixture(scope="module", autouse=True)
def warm(model_dir: Path) -> None:  # noqa: F811
    """What opening a model imports is no growth."""
    load_model(ModelConfig(path=str(model_dir)))


Write = Callable[[Path], Any]


def text(content: str | bytes) -> Write:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda file: file.write_bytes(raw)


def changed(**changes: Any) -> Write:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def directory(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, HUGE)


NO_TEXT: dict[str, Write] = {
    "empty": text(""),
    "no text": text(b"\xff\xfe\x00"),
    "no object": text("[]"),
    "nested": text("[" * 100_000),
    "a pipe": pipe,
    "a folder": directory,
    "sparse": sparse,
}


def with_ids(*ids: Any) -> Write:
    """A tokenizer whose tokens have these ids."""
    model = {"type": "WordLevel", "vocab": {str(at): at for at in ids}, "unk_token": "x"}
    return text(json.dumps({"version": "1.0", "model": model}))


TOKENIZERS = {
    **NO_TEXT,
    "ids that are negative": with_ids(-1),
    "ids beyond 64 bits": with_ids(1 << 70),
    "ids that are texts": with_ids("a"),
    "a model that nobody knows": changed(model={"type": "Evil"}),
    "a splitter that nobody can read": changed(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
    ),
}


@pytest.mark.parametrize("write", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_is_none_is_refused(folder: Path, bounded: None, write: Write) -> None:
    write(folder / "tokenizer.json")
    with pytest.raises(ServiceError, match=r"tokenizer\.json"):
        TextTokenizer(folder)


SETTINGS = {
    **NO_TEXT,
    "a template that is a number": changed(chat_template=5),
    "templates without names": changed(chat_template=[{}]),
}


@pytest.mark.parametrize("write", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_none_are_refused(folder: Path, bounded: None, write: Write) -> None:
    file = folder / "tokenizer_config.json"
    if not file.exists():
        file.write_text("{}")
    write(file)
    with pytest.raises(ServiceError, match=r"tokenizer_config\.json|chat template"):
        TextTokenizer(folder).encode_prompt(CHAT)


TEMPLATES = {
    "no text": text(b"\xff\xfe\x00"),
    "a pipe": pipe,
    "sparse": sparse,
    "no template": text("{% if %}"),
    "a way out": text("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "another file": text("{% include '/etc/passwd' %}"),
    "a loop": text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a macro of itself": text("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "a power": text("{{ 9 ** 99999999 }}"),
    "a long text": text("{{ 'x' * 2000000000 }}"),
    "a doubling": text(
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "a wide field": text("{{ '%2000000000d' % 1 }}"),
    "many lines": text("{{ 'x'.center(2000000000) }}"),
}


@pytest.mark.parametrize("write", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_is_hostile_is_refused(folder: Path, bounded: None, write: Write) -> None:
    write(folder / "chat_template.jinja")
    with pytest.raises(ServiceError, match="template"):
        TextTokenizer(folder).encode_prompt(CHAT)


SPY = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Model: ...\n"
CONFIGS = {
    **NO_TEXT,
    "a kind that nobody knows": changed(model_type="evil"),
    "code of its own": changed(
        model_type="evil", auto_map={"AutoConfig": "spy.Model", "AutoModelForCausalLM": "spy.Model"}
    ),
    "a number of layers without number": changed(num_hidden_layers=10**9),
    "layers that are a text": changed(num_hidden_layers="many"),
    "a width without number": changed(hidden_size=1 << 40),
    "a vocabulary without number": changed(vocab_size=1 << 40),
    "a negative vocabulary": changed(vocab_size=-5),
    "no heads": changed(num_attention_heads=0),
    "an activation that nobody knows": changed(hidden_act="os.system"),
}


@pytest.mark.parametrize("write", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("load", [load_model, model_without_weights], ids=["whole", "hollow"])
def test_a_configuration_that_is_none_is_refused(
    folder: Path, bounded: None, write: Write, load: Callable[[ModelConfig], Any]
) -> None:
    (folder / "spy.py").write_text(SPY)
    write(folder / "config.json")
    with pytest.raises(ServiceError, match="model"):
        load(ModelConfig(path=str(folder)))
    assert not (folder / "ran").exists()


def test_a_configuration_of_more_than_the_weights_is_refused(folder: Path, bounded: None) -> None:
    """A machine may have the memory for it."""
    changed(vocab_size=1 << 26)(folder / "config.json")
    with pytest.raises(ConfigError, match="which its weights do not hold"):
        load_model(ModelConfig(path=str(folder)))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def header(edit: Callable[[dict[str, Any]], Any]) -> Write:
    """A shard whose header says something else."""

    def write(file: Path) -> None:
        tree, data = header_of(file)
        edit(tree)
        head = json.dumps(tree).encode()
        file.write_bytes(struct.pack("<Q", len(head)) + head + data)

    return write


def first(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree[FIRST].update(changes)


def of_size(size: int) -> Write:
    return lambda file: file.write_bytes(struct.pack("<Q", size) + file.read_bytes()[8:])


SHARDS: dict[str, Write] = {
    "empty": text(""),
    "a pipe": pipe,
    "a folder": directory,
    "sparse": sparse,
    "a header of 2**63 bytes": of_size(1 << 63),
    "a header of 2**40 bytes": of_size(1 << 40),
    "a header of no bytes": of_size(0),
    "a nested header": text(struct.pack("<Q", 100_000) + b"[" * 100_000),
    "offsets beyond the file": header(first(data_offsets=[0, 1 << 40])),
    "offsets that go back": header(first(data_offsets=[64, 0])),
    "negative offsets": header(first(data_offsets=[-64, 0])),
    "offsets that overlap": header(lambda tree: tree.update({"x": dict(tree[FIRST])})),
    "a shape beyond 64 bits": header(first(shape=[1 << 70])),
    "a shape whose product overflows": header(first(shape=[1 << 40, 1 << 40])),
    "another shape": header(first(shape=[1])),
    "a negative shape": header(first(shape=[-1])),
    "a type that nobody knows": header(first(dtype="F128")),
}


@pytest.mark.parametrize("write", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("use", ["load", "shapes", "publish"])
def test_weights_that_are_none_are_refused(
    folder: Path, bounded: None, write: Write, use: str
) -> None:
    expected = checkpoint_shapes(str(folder))
    write(folder / SHARD)
    with pytest.raises(ServiceError):
        if use == "load":
            load_model(ModelConfig(path=str(folder)))
        elif use == "shapes":
            found = checkpoint_shapes(str(folder))
            assert found != expected
            raise ServiceError("of another model")
        else:
            publish(folder, expected)


INDEXES: dict[str, Write] = {
    **NO_TEXT,
    "a way out": text(json.dumps({"weight_map": {"x": "../secret.safetensors"}})),
    "another place": text(json.dumps({"weight_map": {"x": "/secret.safetensors"}})),
    "a number": text(json.dumps({"weight_map": {"x": 5}})),
    "names without end": text(json.dumps({"weight_map": {str(n): f"{n}.x" for n in range(100_000)}})),
}  # fmt: skip


@pytest.mark.parametrize("write", INDEXES.values(), ids=INDEXES)
def test_an_index_that_is_none_is_refused(folder: Path, bounded: None, write: Write) -> None:
    expected = checkpoint_shapes(str(folder))
    shutil.copy(folder / SHARD, folder.parent / "secret.safetensors")
    write(folder / INDEX_NAME)
    with pytest.raises(ServiceError) as caught:
        publish(folder, expected)
    assert len(caught.value.message) < 2_000


def publish(folder: Path, expected: dict[str, torch.Size]) -> None:
    """As a server that is told to take its weights from there."""
    config = ReceiverConfig(allow=(str(folder),))
    receiver = make_receiver(config)
    try:
        ModelDirReader(config, receiver).stage(WeightUpdateMeta(1, str(folder)), expected)
    finally:
        receiver.close()


def test_a_good_directory_is_taken(folder: Path, bounded: None) -> None:
    TextTokenizer(folder)
    load_model(ModelConfig(path=str(folder)))
    publish(folder, checkpoint_shapes(str(folder)))
