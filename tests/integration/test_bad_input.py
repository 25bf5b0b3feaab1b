"""What a user gets wrong is answered with one clear line and exit status 2."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and standard error of a `headway` command."""
    done = subprocess.run(
        [sys.executable, "-m", "headway.launch.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_missing_model_directory() -> None:
    code, text = run("serve", "--model.path", "/nowhere", "--service.port", "0")
    assert code == 2
    assert "/nowhere is not a model directory" in text
    assert "model.path" in text


def test_a_missing_tokenizer() -> None:
    code, text = run("gateway", "--tokenizer", "/nowhere", "--service.port", "0")
    assert code == 2
    assert "/nowhere/tokenizer.json does not exist" in text


def test_an_unknown_key_names_its_path_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("tokenizer: x\nexecutor: {max_concurent: 3}\n")
    code, text = run("gateway", "--config", str(file))
    assert code == 2
    assert "executor.max_concurent" in text
    assert "did you mean 'max_concurrent'?" in text


def test_a_port_in_use(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ("--tokenizer", str(model_dir), "--ledger", ":memory:")
        code, text = run("gateway", *arguments, "--service.port", port)
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use" in text


def test_bad_data_names_file_and_line(model_dir: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1"}\n{"prompt": \n')
    arguments = ["--type", "grpo", "--model.path", str(model_dir), "--data.path", str(rows)]
    arguments += ["--rollout.reward.name", "exact", "--weight-sync.root", str(tmp_path / "w")]
    code, text = run("train", *arguments)
    assert code == 2
    assert f"{rows} line 2 is not JSON" in text


def test_an_unknown_command_and_an_unknown_experiment() -> None:
    assert run("trian")[0] == 2
    code, text = run("train", "--type", "grop")
    assert code == 2
    assert "did you mean 'grpo'?" in text


def test_a_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").touch()
    code, text = run("quickstart", "--run-dir", str(tmp_path))
    assert code == 2
    assert "--resume" in text
