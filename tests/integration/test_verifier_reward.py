"""Scores of a whole batch by a verifier of a real gateway, on every rank of the trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.contracts.config.base import ComponentConfig
from headway.contracts.errors import RewardError
from headway.contracts.http.rewards import AnswerToScore
from headway.contracts.types import RewardResult
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.conftest import run_config
from tests.numeric.models import EOS, save_model, write_char_tokenizer
from tests.numeric.ranks import run_ranks
from tests.processes import local_run
from trainer.batching.sequences import SequenceBatch, shift_left
from trainer.interfaces.answers import AnswerTextRule, spread_scores
from trainer.interfaces.reward_verifier import VerifierReward
from trainer.topology import Topology

pytestmark = pytest.mark.extended

ALONE = Topology(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real gateway, whose tokenizer has one token per character."""
    folder = tmp_path_factory.mktemp("gateway")
    write_char_tokenizer(save_model(folder / "model", "llama"))
    with local_run(run_config(folder, folder / "model")) as run:
        run.start_gateway()
        yield run.url


def ids_of(text: str) -> list[int]:
    return [ord(character) - ord(" ") + 2 for character in text]


def asked_batch() -> SequenceBatch:
    """Prompt `1+1=`, some answers, each ended; rows 0, 1, 2 of the data."""
    answers, rows = ["2", "#### 2", "3", "#### 7", "", "2 NO"], [0, 0, 1, 2, 1, 0]
    prompt = ids_of("1+1=")
    sequences = [prompt + ids_of(answer) + [EOS] for answer in answers]
    lengths = tuple(map(len, sequences))
    ids = torch.tensor([token for row in sequences for token in row])
    sampled = torch.cat([torch.arange(length) >= len(prompt) for length in lengths])
    return SequenceBatch(
        lengths,
        {
            "input_ids": ids,
            "action_mask": shift_left(sampled, lengths, False),
            "row": torch.tensor(rows).repeat_interleave(torch.tensor(lengths)),
        },
    )


GSM8K = ComponentConfig(name="gsm8k")
EXPECTED = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
ROWS = [{"answer": "#### 2"}, {"answer": "#### 3"}, {"answer": "#### 7"}]


def unlike(score: float, text: str) -> float:
    return -1.0 if "NO" in text else score


def decode(ids: list[int]) -> str:
    return "".join(chr(i - 2 + ord(" ")) for i in ids if i > 1)


def _verified(
    topology: Topology, url: str, batch: SequenceBatch, rows: list[dict[str, str]]
) -> dict[str, torch.Tensor | str]:
    """What each rank has; the number of requests that it made."""
    client = RemoteInferenceEngine(url, connect_timeout_s=20.0) if topology.is_main else None

    def interface(**options: object) -> VerifierReward:
        return VerifierReward(client, topology, GSM8K, rows.__getitem__, **options)  # type: ignore[arg-type]

    found: dict[str, torch.Tensor | str] = {}
    try:
        found["plain"] = interface().inference(batch)["scores"]
        rule = AnswerTextRule(decode, unlike)
        found["ruled"] = interface(rule=rule).inference(batch)["scores"]
        found["kept"] = interface(failed_score=-5.0).inference(
            batch.with_columns(row=torch.full((batch.num_tokens,), len(rows) - 1))
        )["scores"]
        wrong = batch.with_columns(row=torch.full((batch.num_tokens,), len(rows) - 1))
        try:
            interface().inference(wrong)
        except Exception as error:  # noqa: BLE001 - told to the test
            found["error"] = f"{type(error).__name__}: {error}"
    finally:
        if client is not None:
            client.destroy()
    return found


def test_a_verifiers_scores_are_on_every_rank_and_so_are_its_errors(url: str, tmp_path: Path):
    batch, rows = asked_batch(), [*ROWS, {"question": "?"}]
    both = run_ranks(2, tmp_path / "ranks", _verified, url, batch, rows)
    alone = _verified(ALONE, url, batch, rows)
    for found in [*both, alone]:
        assert found["plain"].dtype == torch.float32
        assert found["plain"].equal(spread_scores(EXPECTED, batch))
        assert found["ruled"].equal(spread_scores([*EXPECTED[:5], -1.0], batch))
        assert found["kept"].equal(torch.full((batch.num_tokens,), -5.0))
        assert found["error"].startswith("DataError: answer 0: ")


class ScriptedScores:
    """`Scores` that keeps what it was asked."""

    def __init__(self, *results: RewardResult) -> None:
        self.results = list(results)
        self.asked: list[AnswerToScore] = []

    def score(self, reward, answers, timeout=0.0, failed_score=None):
        self.asked += answers
        if not self.results:
            raise RewardError("of no use")
        return self.results


def test_each_sequence_is_asked_about_with_its_own_row():
    batch = asked_batch().select([3, 0])
    client = ScriptedScores(RewardResult(0.25), RewardResult(-3.0))
    scores = VerifierReward(client, ALONE, GSM8K, ROWS.__getitem__).inference(batch)["scores"]
    assert scores.tolist() == [0.25] * batch.lengths[0] + [-3.0] * batch.lengths[1]
    first, second = client.asked
    assert (first.data, second.data) == (ROWS[2], ROWS[0])
    assert decode(list(first.prompt_ids)) == "1+1="
    assert list(first.completion_ids) == [*ids_of("#### 7"), EOS]
    json.loads(first.model_dump_json())
    client.results.clear()
    with pytest.raises(RewardError, match="of no use"):
        VerifierReward(client, ALONE, GSM8K, ROWS.__getitem__).inference(batch)
