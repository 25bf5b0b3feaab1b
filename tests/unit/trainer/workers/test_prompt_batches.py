"""Rows as prompts: padded on the left, once for each response, the same from wherever they are read."""

from __future__ import annotations

import json

import pytest
import torch

from headway.contracts.config.data import DataConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.text.tokenizer import TextTokenizer
from tests.numeric.models import save_model, write_char_tokenizer
from trainer.workers.prompt_batches import PromptBatches

PAD = 7


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptBatches:
    folder = tmp_path_factory.mktemp("prompts")
    write_char_tokenizer(save_model(folder / "model", "llama"))
    rows = [{"prompt": "ab" * n, "answer": str(n), "limit": n} for n in (1, 2, 3, 4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(folder / "rows.jsonl"), shuffle=False, max_new_tokens_key="limit")
    tokenizer = TextTokenizer(str(folder / "model"))
    return PromptBatches(data, tokenizer, SamplingConfig(max_new_tokens=9), 2, 5, PAD)


def test_a_prompt_stands_once_for_each_response(prompts: PromptBatches):
    batch = prompts.batch(0, 2)
    lengths = batch["prompt_mask"].sum(1).tolist()
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]
    assert (batch["prompts"][0][: -lengths[0]] == PAD).all()
    assert (
        batch["prompts"][0][-lengths[0] :].tolist() == batch["prompts"][2][-lengths[0] :].tolist()
    )
    assert batch["uid"].tolist() == ["row-0.0"] * 2 + ["row-1.1"] * 2
    assert batch["row"][2] == {"prompt": "abab", "answer": "2", "limit": 2}
    assert batch["max_new_tokens"].tolist() == [1, 1, 2, 2]
    assert batch.meta["temperature"] == 1.0


def test_seeds_follow_from_the_position_alone(prompts: PromptBatches):
    whole = prompts.batch(0, 4)["seeds"]
    assert len(set(whole.tolist())) == 8
    assert torch.equal(prompts.batch(2, 2)["seeds"], whole[4:])
    assert not torch.equal(prompts.batch(4, 4)["seeds"], whole)  # the next epoch
