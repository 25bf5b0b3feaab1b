"""`headway ledger`: what an operator sees beside a running gateway."""

import asyncio
import json
import sys

import pytest
from pyarrow import parquet

from headway.contracts.errors import ConfigError, Conflict, NotFound
from headway.launch.cli import main
from tests.unit.gateway.ledger_suite import SEVERAL_PROCESSES

pytestmark = pytest.mark.parametrize("store", SEVERAL_PROCESSES, indirect=True)


@pytest.fixture
async def running(play, address):
    """A gateway's ledger with a rollout in several states; runs commands beside it."""
    await play.finish("ready", size=3, version=4)
    await play.submit("failed", consumer="other")
    await play.lease()
    await play.ledger.fail(play.leases["failed"], "the verifier hung")
    await play.submit("leased")
    await play.lease()

    async def run(*argv: str) -> None:
        await asyncio.to_thread(main, ["ledger", *argv, "--ledger", address])

    return run


async def test_stats_counts_and_proves(running, capsys):
    await running("stats", "--audit")
    out = capsys.readouterr().out
    counts, _, audit = out.partition("}\n")
    assert json.loads(counts + "}")["submitted"] == 7
    assert json.loads(audit)["lost"] == 0
    await running("stats", "--consumer", "other")
    assert json.loads(capsys.readouterr().out)["failed"] == 2


async def test_show_tells_everything(running, capsys):
    await running("show", "ready")
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["oldest_version"]) == ("ready", 4)
    assert [event["event"] for event in told["events"]] == ["submit", "lease", "complete"]
    assert [row["trajectory_id"] for row in told["trajectories"]] == [
        "ready/0",
        "ready/1",
        "ready/2",
    ]
    assert told["request"]["prompt"]["group_size"] == 3
    with pytest.raises(NotFound, match="no rollout 'z'"):
        await running("show", "z")


async def test_requeue_revives_what_failed_and_names_what_did_not(running, play, capsys):
    await running("requeue", "failed")
    assert capsys.readouterr().out == "failed is queued\n"
    assert await play.lease() == ["failed"]
    assert await play.state("leased") == "leased"
    with pytest.raises(Conflict, match="ready is ready, z is not in the ledger"):
        await running("requeue", "ready", "z")


async def test_export_writes_lines(running, tmp_path, capsys):
    file = tmp_path / "rollouts.jsonl"
    await running("export", str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == ["leased", "failed", "ready"]
    assert rows[2]["mean_reward"] == 1.0
    assert rows[1]["reason"] == "the verifier hung"
    assert capsys.readouterr().out == f"3 rollouts in {file}\n"
    await running("export", str(file), "--state", "failed", "--consumer", "other")
    assert len(file.read_text().splitlines()) == 1


async def test_export_writes_parquet_with_the_same_rows(running, tmp_path):
    lines, table = tmp_path / "rollouts.jsonl", tmp_path / "rollouts.parquet"
    await running("export", str(lines))
    await running("export", str(table))
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert parquet.read_table(table).to_pylist() == rows


async def test_export_of_nothing_is_a_file_without_rows(running, tmp_path):
    await running("export", str(tmp_path / "rollouts.parquet"), "--state", "stale")
    assert parquet.read_table(tmp_path / "rollouts.parquet").num_rows == 0


async def test_a_missing_library_is_named(running, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"the extra 'export'"):
        await running("export", str(tmp_path / "rollouts.parquet"))
    assert list(tmp_path.glob("rollouts*")) == []


async def test_a_file_that_cannot_be_written_is_named(running, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        await running("export", str(tmp_path / "nowhere" / "rollouts.jsonl"))


def test_a_ledger_that_is_not_there_is_not_made(tmp_path, store):
    with pytest.raises(ConfigError, match="name one with --ledger"):
        main(["ledger", "stats", "--ledger", str(tmp_path / "no.sqlite")])
    assert not (tmp_path / "no.sqlite").exists()
