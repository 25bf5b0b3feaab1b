"""Rows of demonstrations and pairs as tokens, and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headway.contracts.config.data import (
    DemonstrationDataConfig,
    MarginPairDataConfig,
    PairDataConfig,
)
from headway.contracts.errors import ConfigError, DataError
from tests.numeric.models import EOS, write_char_tokenizer
from trainer.data_supervised import Encoder, Example, demonstrations, pack_examples, pairs
from trainer.topology import Topology

ALONE = Topology(0, 1, torch.device("cpu"))
ROW = {"prompt": "ab", "chosen": "cde", "rejected": "f"}


@pytest.fixture
def encoder(tmp_path) -> Encoder:
    write_char_tokenizer(tmp_path)
    return Encoder(str(tmp_path))


@pytest.fixture
def write(tmp_path):
    def rows(*given: dict) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        return str(path)

    return rows


def tokens(text: str) -> list[int]:
    return [ord(c) - ord(" ") + 2 for c in text]


def sequences_of(batch) -> list[list[int]]:
    return [part.tolist() for part in torch.split(batch["input_ids"], list(batch.lengths))]


def upper(row: dict) -> dict:
    return {key: value.upper() if isinstance(value, str) else value for key, value in row.items()}


def test_a_pair_is_the_prompt_with_each_answer_and_the_end_of_sequence(encoder, write):
    data = pairs(PairDataConfig(path=write(upper(ROW))), encoder)
    batch = data.batch(0, 1, ALONE)
    assert sequences_of(batch) == [[*tokens("ABCDE"), EOS], [*tokens("ABF"), EOS]]
    # Position t judges token t + 1: the answers, and no prompt.
    assert batch["loss_mask"].tolist() == [0, 1, 1, 1, 1, 0, 0, 1, 1, 0]
    assert batch["labels"].tolist() == [*tokens("BCDE"), EOS, 0, *tokens("BF"), EOS, 0]
    assert "margin" not in batch.columns


def test_templates_name_the_fields_of_a_row(encoder, write):
    path = write({"q": "A", "yes": "B", "no": "C", "by": 2})
    config = MarginPairDataConfig(
        path=path,
        prompt_template="{q}=",
        chosen_template=":{yes}",
        rejected_template=":{no}",
        margin_key="by",
    )
    batch = pairs(config, encoder).everything(ALONE)
    assert sequences_of(batch) == [[*tokens("A=:B"), EOS], [*tokens("A=:C"), EOS]]
    assert batch["margin"].tolist() == [2.0] * 10


def test_rows_come_in_the_order_of_the_cursor_over_epochs(encoder, write):
    rows = [{"prompt": p, "completion": "Z"} for p in "ABC"]
    data = demonstrations(DemonstrationDataConfig(path=write(*rows), seed=3), encoder)
    seen = [sequences_of(data.batch(cursor, 1, ALONE))[0][0] for cursor in range(9)]
    epochs = [seen[0:3], seen[3:6], seen[6:9]]
    assert all(sorted(epoch) == tokens("ABC") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert sequences_of(data.batch(4, 3, ALONE))[0][0] in tokens("ABC")


def test_every_pair_goes_whole_to_one_rank(encoder, write):
    rows = [{"prompt": "A" * (i + 1), "chosen": "B", "rejected": "C" * i} for i in range(1, 8)]
    config = PairDataConfig(path=write(*rows), shuffle=False)
    data = pairs(config, encoder)
    shares = [data.batch(0, 7, Topology(rank, 2, torch.device("cpu"))) for rank in range(2)]
    found = []
    for share in shares:
        sequences = sequences_of(share)
        found += list(zip(sequences[0::2], sequences[1::2], strict=True))
    whole = sequences_of(data.everything(ALONE))
    assert sorted(found) == sorted(zip(whole[0::2], whole[1::2], strict=True))


def test_a_chat_prompt_is_rendered_by_the_models_template(encoder, write):
    path = write(upper(ROW))
    config = PairDataConfig(path=path, chat=True, system_prompt="S")
    with pytest.raises(DataError, match=r"no chat template; set data\.chat=false"):
        pairs(config, encoder)
    encoder.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role | upper }}>{{ m.content }}{% endfor %}:"
    )
    prompt = sequences_of(pairs(config, encoder).everything(ALONE))[0][:-4]
    assert prompt == tokens("<SYSTEM>S<USER>AB:")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": None}, r"row 2: template '\{chosen\}' needs 'chosen'; the row has"),
        ({"rejected": None}, r"row 2: template '\{rejected\}' needs 'rejected'"),
        ({"prompt": None}, r"row 2: template '\{prompt\}' needs 'prompt'"),
        ({"chosen": " \n"}, r"row 2: '\{chosen\}' is empty; take the row out"),
        ({"rejected": ""}, r"row 2: '\{rejected\}' is empty"),
        (
            {"rejected": "cde"},
            r"row 2: the chosen and the rejected answer are equal as tokens; take",
        ),
        ({"prompt": ""}, r"row 2: the prompt is empty, and this tokenizer begins with nothing"),
        ({"by": "much"}, r"row 2: field 'by' is 'much'; data\.margin_key wants"),
        ({"by": True}, r"row 2: field 'by' is True"),
        ({"by": None}, r"row 2: field 'by' is None"),
    ],
)
def test_a_row_that_is_wrong_is_named_with_what_to_do(encoder, write, change, message):
    row = ROW | {"by": 1}
    absent = {key: value for key, value in (row | change).items() if value is not None}
    for wrong in (row | change, absent):  # null is missing
        config = MarginPairDataConfig(path=write(row, wrong, row), margin_key="by")
        with pytest.raises(DataError, match=message):
            pairs(config, encoder)


def test_a_margin_that_is_not_finite_is_refused(encoder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "A", "chosen": "B", "rejected": "C", "by": NaN}\n')
    with pytest.raises(DataError, match="field 'by' is nan"):
        pairs(MarginPairDataConfig(path=str(path), margin_key="by"), encoder)


def test_a_row_above_the_token_budget_is_refused_before_training(encoder, write):
    data = pairs(PairDataConfig(path=write(ROW, ROW | {"chosen": "c" * 20})), encoder)
    data.refuse_above(27)
    with pytest.raises(
        DataError, match=r"row 2: 2 x prompt and answer have 27 tokens, .* of 26; raise trainer"
    ):
        data.refuse_above(26)


def test_a_tokenizer_without_an_end_of_sequence_is_refused(tmp_path: Path):
    write_char_tokenizer(tmp_path)
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        Encoder(str(tmp_path))


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .*; set model\.path"):
        Encoder(str(tmp_path / "nowhere"))


def test_a_margin_stands_at_every_token_of_its_pair():
    examples = [Example([5], ([6], [7, 8]), 0.5), Example([5], ([6], [9]), 2.0)]
    assert pack_examples(examples)["margin"].tolist() == [0.5] * 5 + [2.0] * 4
