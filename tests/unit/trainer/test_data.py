"""Rows, templates and the cursor over epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.contracts.config.data import DataConfig
from headway.contracts.errors import DataError
from trainer.data import PromptData, read_rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rows_file(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": f"c{i}", "n": i} for i in range(7)]
    return write(tmp_path / "rows.jsonl", rows)


def load(path: Path, **config) -> PromptData:
    return PromptData(DataConfig(path=str(path), **config))


def test_every_epoch_visits_every_row_once_in_its_own_order(rows_file):
    data = load(rows_file, seed=3)
    epochs = [[data.row_index(7 * epoch + i) for i in range(7)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_follows_from_the_seed_and_a_cursor_resumes_anywhere(rows_file):
    data = load(rows_file, seed=3)
    order = [data.row_index(i) for i in range(30)]
    assert [load(rows_file, seed=3).row_index(i) for i in reversed(range(30))] == order[::-1]
    assert [load(rows_file, seed=4).row_index(i) for i in range(30)] != order


def test_without_shuffle_the_file_order_repeats(rows_file):
    data = load(rows_file, shuffle=False)
    assert [data.row_index(i) for i in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert len(data) == 7


def test_a_prompt_carries_its_text_row_and_a_name_of_its_own_in_every_epoch(rows_file):
    data = load(rows_file, shuffle=False, prompt_template="{prompt} #{n}")
    first, again = data.prompt(2, 4), data.prompt(9, 4)
    assert first.text == again.text == "p2 #2"
    assert first.group_size == 4
    assert first.data == {"prompt": "p2", "completion": "c2", "n": 2}
    assert first.group_id != again.group_id


def test_a_chat_prompt_is_a_system_and_a_user_message(rows_file):
    data = load(rows_file, shuffle=False, chat=True, system_prompt="be brief")
    assert [(m.role, m.content) for m in data.prompt(1, 1).messages] == [
        ("system", "be brief"),
        ("user", "p1"),
    ]
    (message,) = load(rows_file, shuffle=False, chat=True).prompt(1, 1).messages
    assert message.role == "user"


def test_a_directory_is_read_in_name_order_and_blank_lines_are_skipped(tmp_path):
    write(tmp_path / "b.jsonl", [{"prompt": "second"}])
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "first"}\n\n')
    (tmp_path / "c.txt").write_text("not a row")
    assert [row["prompt"] for row in read_rows(tmp_path)] == ["first", "second"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_separators_of_unicode_within_a_string_do_not_end_a_row(tmp_path, separator):
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False)
    path.write_text(row + "\r\n" + row + "\n", encoding="utf-8")
    assert [r["prompt"] for r in read_rows(path)] == [f"a{separator}b"] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', r"rows\.jsonl line 3 is not JSON"),
        ("[1, 2]", r"rows\.jsonl line 3 is a list; a JSON object is wanted"),
        ("null", r"rows\.jsonl line 3 is a NoneType"),
    ],
)
def test_a_bad_row_names_path_and_line(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(DataError, match=message):
        read_rows(path)


def test_a_missing_or_empty_file_is_a_data_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"cannot read data .*nowhere.*set data\.path"):
        read_rows(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no rows"):
        read_rows(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read data"):
        read_rows(tmp_path / "binary.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder holds no rows"):
        read_rows(tmp_path / "folder")


@pytest.mark.parametrize("template", ["{question}", "{}", "{prompt", "{prompt.x}", "{n[0]}"])
def test_a_template_that_does_not_fit_fails_at_the_start_and_names_the_row(rows_file, template):
    with pytest.raises(DataError, match=r"rows\.jsonl row 1: template"):
        load(rows_file, prompt_template=template)
