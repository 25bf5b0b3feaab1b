"""The active prompts, in the order of the data, over epochs and crashes."""

from __future__ import annotations

import json

import pytest

from headway.contracts.config.data import DataConfig
from headway.contracts.config.experiment import GRPOExperiment
from headway.contracts.errors import DataError, RequestTooLong
from tests.numeric.models import write_char_tokenizer
from trainer.data import PromptData
from trainer.data_supervised import Encoder
from trainer.prompt_filter import PromptFilter, long_prompts, without_unfit

NUM_ROWS = 6


@pytest.fixture
def data(tmp_path) -> PromptData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * (i + 1)}) + "\n" for i in range(NUM_ROWS)))
    return PromptData(DataConfig(path=str(path), seed=5))


def observe(rows: PromptFilter, data: PromptData, rewards: dict[int, float]) -> None:
    """By row."""
    position_of = {data.row_index(at): at for at in range(NUM_ROWS)}
    rows.observe([position_of[row] for row in rewards], list(rewards.values()))


def rows_at(data: PromptData, positions: list[int]) -> list[int]:
    return [data.row_index(at) for at in positions]


def test_unless_rows_left_positions_follow_one_another(data):
    rows = PromptFilter(data, threshold=0.5, max_share=1.0)
    observe(rows, data, {0: 0.5})  # not above
    assert rows.take(4, 5) == ([4, 5, 6, 7, 8], 9)


def test_rows_that_left_are_passed_over_and_the_order_of_others_stays(data):
    rows = PromptFilter(data, threshold=0.5, max_share=1.0)
    observe(rows, data, {1: 0.9, 4: 0.6, 2: 0.5})
    first, cursor = rows.take(0, NUM_ROWS)
    assert sorted(rows_at(data, first)) == list(range(NUM_ROWS))
    second, cursor = rows.take(cursor, 4)
    kept = [row for row in rows_at(data, list(range(6, 12))) if row not in (1, 4)]
    assert rows_at(data, second) == kept
    third, cursor = rows.take(cursor, 4)
    assert sorted(rows_at(data, third)) == [0, 2, 3, 5]
    assert 2 * NUM_ROWS < cursor <= 3 * NUM_ROWS
    assert all(at >= 2 * NUM_ROWS for at in third)


def test_an_epoch_that_ends_within_a_request_counts_what_was_seen_by_then(data):
    rows = PromptFilter(data, threshold=0.5, max_share=1.0)
    rows.take(0, NUM_ROWS + 1)  # the first prompt of the next epoch is submitted
    observe(rows, data, {1: 0.9})
    assert len(rows.active) == NUM_ROWS
    rows.take(NUM_ROWS + 1, NUM_ROWS)
    assert rows.active == [0, 2, 3, 4, 5]


def test_a_later_group_of_a_prompt_counts_alone(data):
    rows = PromptFilter(data, threshold=0.5, max_share=1.0)
    observe(rows, data, {1: 0.9, 2: 0.1})
    observe(rows, data, {1: 0.1, 2: 0.9})
    rows.take(NUM_ROWS, 1)
    assert rows.active == [0, 1, 3, 4, 5]


def test_the_share_is_of_what_is_in_play(data):
    rows = PromptFilter(data, threshold=0.0, max_share=0.4, left_out=[5])
    observe(rows, data, {row: 0.1 * row for row in range(NUM_ROWS)})
    sizes = []
    for epoch in range(1, 5):
        rows.take(NUM_ROWS * epoch, 1)
        sizes.append(len(rows.active))
    assert sizes == [3, 2, 2, 2]  # int(5 · 0.4), int(3 · 0.4), int(2 · 0.4)
    assert rows.active == [0, 1]  # 1 is above 0, and no share is left for it


def test_a_resumed_run_passes_over_what_had_left(data):
    rows = PromptFilter(data, threshold=0.5, max_share=0.5)
    observe(rows, data, {0: 0.7, 1: 0.9, 3: -1.0})
    rows.take(0, NUM_ROWS + 2)
    observe(rows, data, {2: 2.0})
    state = json.loads(json.dumps(rows.state_dict()))
    assert all(isinstance(value, float) for value in state.values())
    resumed = PromptFilter(data, threshold=0.5, max_share=0.5)
    resumed.load_state_dict(state)
    assert resumed.active == rows.active == [2, 3, 4, 5]
    assert resumed.state_dict() == rows.state_dict()
    for one in (rows, resumed):
        one.take(2 * NUM_ROWS, 1)
    assert resumed.active == rows.active == [3, 4, 5]


def test_no_position_ever_means_another_prompt(data):
    """Else a run that crashed and resumes would submit other content under an id that is known."""
    plain, filtered = (PromptFilter(data, 0.5, 1.0) for _ in range(2))
    observe(filtered, data, {0: 0.9, 1: 0.9})
    (some, _), (fewer, _) = plain.take(0, 3 * NUM_ROWS), filtered.take(0, 2 * NUM_ROWS)
    assert set(fewer) < set(range(3 * NUM_ROWS)) == set(some)


def test_nothing_left_is_an_error_not_an_endless_search(data):
    with pytest.raises(DataError, match="6 are too long and 0 had rewards"):
        PromptFilter(data, 0.5, 1.0, left_out=range(NUM_ROWS))
    rows = PromptFilter(data, 0.5, 1.0)
    observe(rows, data, dict.fromkeys(range(NUM_ROWS), 1.0))
    with pytest.raises(DataError, match=r"6 had rewards above 0\.5: none is left"):
        rows.take(NUM_ROWS, 1)


def test_a_checkpoint_of_other_data_is_refused(data):
    rows = PromptFilter(data, 0.5, 1.0)
    with pytest.raises(DataError, match="knows prompt 7, and the data set has 6 rows"):
        rows.load_state_dict({"epoch": 1.0, "left.6": 1.0})


def test_long_prompts_are_counted_in_tokens(data, tmp_path):
    write_char_tokenizer(tmp_path)
    encoder = Encoder(str(tmp_path))
    lengths = [len(ids) for ids in encoder.prompts(data, chat=False)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    wanted = {row for row, length in enumerate(lengths) if length > lengths[2]}
    assert long_prompts(data, encoder, False, lengths[2]) == wanted == {3, 4, 5}


def learner(data_path: str, model: str, **sections) -> GRPOExperiment:
    """Samples 4 tokens, unless a row says otherwise."""
    tree = {
        "model": {"path": model},
        "data": {
            "path": data_path,
            "batch_size": 2,
            "max_new_tokens_key": sections.pop("key", None),
        },
        "sampling": {"max_new_tokens": 4},
        "rollout": {"reward": {"name": "exact"}, **sections},
        "weight_sync": {"type": "disk", "root": "nowhere"},
    }
    return GRPOExperiment.model_validate(tree)


@pytest.fixture
def long_rows(tmp_path) -> str:
    """Prompts of 1,000 to 1,005 characters, each of one token; every second row samples 10."""
    write_char_tokenizer(tmp_path)
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": "x" * (1000 + i), "limit": 10 if i % 2 else 4} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def left_out(config: GRPOExperiment, limit: int | None) -> list[int]:
    data = PromptData(config.data)
    rows = without_unfit(None, config, data, limit)
    return [] if rows is None else sorted(set(range(NUM_ROWS)) - set(rows.active))


def test_prompts_beyond_the_context_are_left_out_and_told_once(long_rows, tmp_path, caplog):
    config = learner(long_rows, str(tmp_path))
    data = PromptData(config.data)
    first = len(Encoder(str(tmp_path)).prompts(data, chat=False)[0])
    assert left_out(config, first + 3 + 4) == [4, 5]
    (told,) = caplog.records
    assert "prompts are left out" in told.message
    assert (told.prompts, told.of, told.prompt_tokens, told.context) == (2, 6, first + 5, first + 7)
    assert "sampling.max_new_tokens" in told.remedy
    assert left_out(learner(long_rows, str(tmp_path), key="limit"), first + 10) == [1, 3, 5]


@pytest.mark.parametrize("limit", [None, 10_000])
def test_where_every_prompt_fits_there_is_no_filter(long_rows, tmp_path, limit):
    config = learner(long_rows, str(tmp_path))
    assert without_unfit(None, config, PromptData(config.data), limit) is None


def test_a_filter_that_is_there_leaves_them_out_too(long_rows, tmp_path):
    config = learner(long_rows, str(tmp_path))
    data = PromptData(config.data)
    first = len(Encoder(str(tmp_path)).prompts(data, chat=False)[0])
    rows = PromptFilter(data, 0.5, 1.0, left_out=[0])
    assert without_unfit(rows, config, data, first + 3 + 4) is rows
    assert rows.active == [1, 2, 3]


def test_a_run_none_of_whose_prompts_fits_is_refused(long_rows, tmp_path):
    config = learner(long_rows, str(tmp_path))
    seen = r"none of 6 prompts .*long.jsonl row 1: \d+ prompt tokens \+ max_new_tokens=4 exceed"
    with pytest.raises(RequestTooLong, match=seen):
        left_out(config, 900)


def test_a_row_that_the_workflow_bounds_is_not_too_long(long_rows, tmp_path):
    bounded = {"name": "multi_turn", "args": {"max_tokens": 1010}}
    assert left_out(learner(long_rows, str(tmp_path), workflow=bounded), 1010) == []
    assert left_out(learner(long_rows, str(tmp_path), workflow={"name": "session"}), 1010) == []


def test_without_a_tokenizer_nobody_knows_and_nothing_is_left_out(long_rows, caplog):
    assert left_out(learner(long_rows, "/nowhere"), 900) == []
    assert "whether all prompts fit is not known" in caplog.text
