"""The role reward: a rule, a model, and a model with another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.critic import ValueModelConfig
from headway.contracts.config.workers import WorkerRewardConfig
from headway.contracts.errors import ConfigError, DataError
from headway.text.tokenizer import TextTokenizer
from tests.numeric.models import save_model, write_char_tokenizer
from tests.numeric.worker_rows import random_rows, workers_config
from trainer.workers.data_proto import DataProto
from trainer.workers.padding import sequence_columns
from trainer.workers.reward_worker import RewardWorker

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }};{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("model"), "llama")
    write_char_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose tokenizer numbers the characters the other way round, and has a template."""
    other = save_model(tmp_path_factory.mktemp("other"), "llama")
    write_char_tokenizer(other)
    file = other / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    last = max(vocabulary.values())
    tree["model"]["vocab"] = {c: i if i < 2 else last + 2 - i for c, i in vocabulary.items()}
    file.write_text(json.dumps(tree))
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    return other


def ready(folder: Path, reward: WorkerRewardConfig) -> RewardWorker:
    worker = RewardWorker(workers_config(folder, reward=reward))
    worker.init_model()
    return worker


def batch_of(folder: Path, pairs: list[tuple[str, str]], **objects: list[object]) -> DataProto:
    """Prompts of one length, and responses padded to the longest."""
    encode = TextTokenizer(str(folder)).encode
    prompts = [encode(prompt, False) for prompt, _ in pairs]
    responses = [encode(response, False) for _, response in pairs]
    width = max(map(len, responses))
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in responses])
    padded = torch.tensor([r + [0] * (width - len(r)) for r in responses])
    ids = torch.tensor(prompts)
    return DataProto.of(**sequence_columns(ids, torch.ones_like(ids), padded, mask), **objects)


def test_a_rule_reads_text_and_row(folder: Path):
    rule = ComponentConfig(name="exact", args={"pattern": "=(.)"})
    worker = ready(folder, WorkerRewardConfig(rule=rule))
    rows: list[object] = [{"answer": "A"}, {"answer": "A"}]
    batch = batch_of(folder, [("X:", "=A"), ("Y:", "==B")], row=rows)
    scored = worker.compute_rm_score(batch)
    assert scored["scores"].tolist() == [1.0, 0.0]
    assert scored["rm_scores"].tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    wrong = batch_of(folder, [("X:", "=A")], row=[{"solution": "A"}])
    with pytest.raises(DataError, match="no field 'answer'"):
        worker.compute_rm_score(wrong)
    worker.close()


def test_a_rule_that_fails_may_have_a_score(folder: Path):
    rule = ComponentConfig(name="exact")
    worker = ready(folder, WorkerRewardConfig(rule=rule, failed_score=-1.0))
    batch = batch_of(folder, [("X:", "A"), ("Y:", "A")], row=[{"solution": "A"}, {"answer": "A"}])
    assert worker.compute_rm_score(batch)["scores"].tolist() == [-1.0, 1.0]
    worker.close()


def test_a_model_with_another_tokenizer_reads_the_same_text(folder: Path, other: Path):
    model = ValueModelConfig(path=str(other), seed=3)
    plain = ready(folder, WorkerRewardConfig(model=model))
    second = ready(folder, WorkerRewardConfig(model=model, input_tokenizer=str(folder)))
    pairs = [("AB:", "CDE"), ("XY:", "Z")]
    expected = plain.compute_rm_score(batch_of(other, pairs))["scores"]
    assert torch.allclose(second.compute_rm_score(batch_of(folder, pairs))["scores"], expected)
    as_they_are = plain.compute_rm_score(batch_of(folder, pairs))["scores"]
    assert not torch.allclose(as_they_are, expected)


def test_a_chat_gets_the_reward_model_s_own_template(folder: Path, other: Path):
    model = ValueModelConfig(path=str(other), seed=3)
    plain = ready(folder, WorkerRewardConfig(model=model))
    second = ready(folder, WorkerRewardConfig(model=model, input_tokenizer=str(folder)))
    chat = [{"role": "user", "content": "AB"}]
    batch = batch_of(folder, [("??", "CDE")], messages=[chat])
    expected = plain.compute_rm_score(batch_of(other, [("u=AB;", "a=CDE;")]))["scores"]
    assert torch.allclose(second.compute_rm_score(batch)["scores"], expected)
    short = WorkerRewardConfig(model=model, input_tokenizer=str(folder), max_length=5)
    cut = ready(folder, short).compute_rm_score(batch)["scores"]
    assert torch.allclose(cut, plain.compute_rm_score(batch_of(other, [("u=A", "B;")]))["scores"])


def test_what_cannot_score_says_so(folder: Path):
    with pytest.raises(ConfigError, match=r"set reward\.rule or \.model"):
        ready(folder, WorkerRewardConfig())
    with pytest.raises(ConfigError, match="came before init_model"):
        RewardWorker(workers_config(folder)).compute_rm_score(random_rows(1))
