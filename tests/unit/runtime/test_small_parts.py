"""Command edge, metrics journal, log lines and the metrics page."""

import io
import json
import logging
import sys

import pytest

from headway.contracts.config.base import LogFormat
from headway.contracts.errors import BackendError, ConfigError, DataError, StateError, UnknownName
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.servers import ServerStatus
from headway.contracts.http.status import StatusResponse
from headway.runtime.command import run_command
from headway.runtime.journal import MetricsJournal, read_steps
from headway.runtime.logging import JsonFormatter, TextFormatter, configure_logging
from headway.runtime.metrics import render_metrics


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("lr=0"), 2, "error: lr=0\n"),
        (UnknownName("no reward"), 2, "error: no reward\n"),
        (DataError("row 3"), 2, "error: row 3\n"),
        (BackendError("gone"), 1, "error [backend]: gone\n"),
        (StateError("full"), 1, "error [state]: full\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=repr,
)
def test_our_errors_end_a_command_with_one_line(capsys, error, status, line):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(main, [])
    assert caught.value.code == status
    assert capsys.readouterr().err == line


def test_a_command_that_returns_ends_well():
    with pytest.raises(SystemExit) as caught:
        run_command(lambda argv: None, [])
    assert caught.value.code == 0


def test_a_mistake_of_ours_keeps_its_traceback():
    def main(argv):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(main, [])


def test_a_resumed_run_counts_each_step_once(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    for steps in ([0, 1, 2], [2, 3]):
        journal = MetricsJournal(file)
        for step in steps:
            journal.write({"step": step, "loss": len(steps)})
        journal.close()
    metrics = [(row["step"], row["loss"]) for row in read_steps(file)]
    assert metrics == [(0, 3), (1, 3), (2, 2), (3, 2)]


def test_a_half_written_line_is_no_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_steps(file) == [{"step": 0}]
    assert read_steps(tmp_path / "nowhere") == []


def test_after_a_half_written_line_the_next_run_goes_on(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1, "lo')
    journal = MetricsJournal(file)
    journal.write({"step": 1})
    journal.write({"step": 2})
    journal.close()
    assert [row["step"] for row in read_steps(file)] == [0, 1, 2]


def test_a_journal_without_a_path_writes_nothing():
    journal = MetricsJournal(None)
    journal.write({"step": 0})
    journal.close()


def test_log_lines_are_json_with_role_and_extras():
    record = logging.LogRecord("headway.x", logging.WARNING, "f", 1, "lost %s", ("s1",), None)
    record.server = "s1"
    record.where = object  # not JSON: written as text
    line = json.loads(JsonFormatter("gateway").format(record))
    assert (line["role"], line["level"], line["message"]) == ("gateway", "warning", "lost s1")
    assert (line["server"], line["where"]) == ("s1", str(object))
    assert line["time"].endswith("Z")


def test_log_lines_on_a_terminal_are_readable_and_cannot_steer_it():
    record = logging.LogRecord("headway.x", logging.WARNING, "f", 1, "%s\x1b[2J", ("lost",), None)
    record.server, record.reason = "http://h:1", "no answer\nforged line"
    record._ray_timestamp_ns = 1  # as Ray's record factory
    line = TextFormatter("gateway", is_coloured=False).format(record)
    assert line.partition(" ")[2] == (
        r'warning gateway: lost\u001b[2J server=http://h:1 reason="no answer\nforged line"'
    )
    coloured = TextFormatter("gateway", is_coloured=True).format(record)
    assert "\x1b[33mwarning\x1b[0m gateway: " in coloured


@pytest.mark.parametrize(
    ("is_terminal", "log_format", "no_color", "wanted"),
    [
        (False, "auto", "", '{"time": '),
        (True, "json", "", '{"time": '),
        (True, "auto", "", "\x1b[31merror  \x1b[0m gateway: gone\n"),
        (True, "auto", "1", " error   gateway: gone\n"),
        (False, "text", "", " error   gateway: gone\n"),
    ],
)
def test_logs_are_text_on_a_terminal_and_json_elsewhere(
    monkeypatch, is_terminal: bool, log_format: LogFormat, no_color: str, wanted: str
):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("NO_COLOR", no_color)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    configure_logging("gateway", log_format)
    logging.getLogger("headway.x").error("gone")
    root.handlers[:], root.level = before
    assert wanted in stderr.getvalue()


def test_the_metrics_page_shows_states_and_servers():
    server = ServerStatus(
        server_id="s1", url="http://h:1", version=4, running=2, state="ready", generated_tokens=9
    )
    page = render_metrics(
        StatusResponse(
            version=4,
            running=3,
            capacity=-1,
            max_staleness=2,
            counts=LedgerCounts(submitted=5, ready=5),
            servers=[server],
            generated_tokens=9,
        )
    ).decode()
    for line in (
        "headway_weight_version 4.0",
        "headway_rollout_capacity_trajectories -1.0",
        'headway_ledger_trajectories{state="ready"} 5.0',
        'headway_server_weight_version{server="s1"} 4.0',
        "headway_generated_tokens_total 9.0",
    ):
        assert line in page.splitlines()
