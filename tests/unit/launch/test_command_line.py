"""The command line as a whole: help of every command, completion in a real shell, wrong lines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gateway.ledger.commands.main import STATES
from headway.contracts.http.rollouts import RolloutState
from headway.launch.cli import COMMANDS, entry, main, root
from headway.launch.completion import SHELLS
from headway.runtime.command import run_command
from headway.runtime.command_line import Group
from headway.runtime.settings import names_of_kinds, required, settings_of

DEADLINE_S = 60


def paths(command: click.Command = root, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and of the commands below it."""
    if not isinstance(command, Group):
        yield above
        return
    context = click.Context(command, **command.context_settings)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        if isinstance(found, Group):
            yield (*above, name)
        yield from paths(found, (*above, name))


ALL = list(paths())
OF_SETTINGS = {"gateway": "gateway", "serve": "server", "train": "grpo", "slurm": "sft"}


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints; it must not fail."""
    capsys.readouterr()
    main(argv)
    return capsys.readouterr().out


def test_every_command_and_those_below_it_are_tried():
    assert {words[0] for words in ALL} == {*COMMANDS, "help"}
    assert {("ledger", "export"), ("weights", "gc"), ("config", "show")} <= set(ALL)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_command_helps(words, capsys):
    text = printed(capsys, *words, "--help")
    assert text.startswith(f"Usage: headway {' '.join(words)}")
    assert "Options:" in text and "-h, --help" in text
    assert "Example" in text and f"headway {words[0]}" in text.partition("Example")[2]
    assert printed(capsys, *words, "-h") == text
    assert printed(capsys, "help", *words) == text


def test_help_without_a_command_lists_them_all(capsys):
    text = printed(capsys, "help")
    assert all(f"\n  {name} " in text for name in [*COMMANDS, "help"])
    assert printed(capsys) == printed(capsys, "-h") == text
    assert printed(capsys, "--version").startswith("headway ")


@pytest.mark.parametrize(("command", "kind"), OF_SETTINGS.items())
def test_help_tells_every_setting_with_default_and_meaning(command, kind, capsys):
    typed = [] if kind in ("gateway", "server") else ["--type", kind]
    text = "".join(printed(capsys, command, *typed, "--help").split())
    for setting in settings_of(kind):
        assert setting.flag in text
        assert "".join(setting.text.split()) in text
    assert "[default:" in text and "[required]" in text


def test_help_of_train_explains_the_type_and_of_run_what_has_no_default(capsys):
    text = printed(capsys, "train", "--help")
    assert "headway train --type NAME --help" in text
    assert all(f"  {kind} " in text for kind in ("grpo", "ppo-code", "sft"))
    assert "--ppo." not in text and "--optimizer.lr" in text
    run = printed(capsys, "run", "--help")
    needed = [setting.flag for setting in required(settings_of("run", ("grpo",)))]
    needed.remove("--trainer.weight-sync.root")  # a run fills it in
    assert "--gateway.tokenizer" in needed and all(f"{flag} " in run for flag in needed)
    assert "--ppo.kl-ctl" in printed(capsys, "train", "--type", "ppo-code", "-h")


@pytest.mark.parametrize("kind", names_of_kinds())
def test_config_shows_every_setting(kind, capsys):
    text = printed(capsys, "config", "show", kind)
    assert all(f"{setting.flag} " in text for setting in settings_of(kind))


def test_help_is_as_wide_as_the_terminal(capsys, monkeypatch):
    for width in (70, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = printed(capsys, "gateway", "--help").splitlines()
        assert width - 15 < max(map(len, lines)) <= width


REPORT_HEAVY_IMPORTS = f"""
import sys
from headway.launch.cli import main
for words in {ALL!r}:
    main([*words, "--help"])
heavy = sys.modules.keys() & {{"torch", "numpy", "pydantic", "yaml", "aiohttp", "rich"}}
sys.exit(f"help loads {{heavy}}" if heavy else 0)
"""


def test_help_loads_nothing_that_would_make_it_wait():
    done = run([sys.executable, "-c", REPORT_HEAVY_IMPORTS])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "known"), [("trainer", "--optimizer.lr"), ("inference_server", "--model.path")]
)
def test_a_process_started_as_a_module_helps(module, known):
    done = run([sys.executable, "-m", module, "--help"])
    assert done.returncode == 0 and done.stdout.startswith(f"Usage: python -m {module} ")
    assert known in done.stdout


def run(argv: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=os.environ | env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


WRONG = [
    ("trian", 2, "no command 'trian'; did you mean 'train'?"),
    ("ledger shwo sum-1", 2, "no command 'shwo'; did you mean 'show'?"),
    ("quickstart --step 3", 2, "no option '--step'; did you mean '--steps'?"),
    ("status", 2, "missing argument 'URL'\nusage: headway status [OPTIONS] URL"),
    ("pin gateway-1", 2, "'gateway-1' is no URL; http://HOST:PORT is wanted"),
    ("rollback http://127.0.0.1:1 newest", 2, "'newest' is no version; give its number"),
    ("weights gc runs/x", 2, "missing option '--keep'"),
    ("run run.yaml", 2, "a file of settings is written --config run.yaml"),
    ("run --cofig run.yaml", 2, "unknown key cofig; did you mean --config?"),
    ("serve --model.pth m", 2, "give --model.path VALUE, or model.path in a file of --config"),
    ("gateway --tokenizer", 2, "--tokenizer has no value; write --tokenizer VALUE"),
    ("gateway --tokenizer t --max-queued 3", 2, "did you mean 'executor.max_queued'?"),
    ("train --config --type grpo", 2, "--config has no value before --type"),
    ("slurm --type grop", 2, "type=grop is no experiment"),
    ("train --type grop --help", 2, "did you mean 'grpo'?"),
    ("config show serve", 2, "nothing named 'serve' can be configured; did you mean 'server'?"),
    ("config", 2, "config wants a command; there are show, check, graph"),
    ("ledger stats --ledger nowhere.sqlite", 2, "name one with --ledger"),
    ("status http://127.0.0.1:1 --token-env NO_SUCH_TOKEN", 2, "NO_SUCH_TOKEN, which is not set"),
    ("completion tcsh", 2, "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    ("help shwo", 2, "no command 'shwo'"),
]


@pytest.fixture
def answered(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """Exit status and standard error of a command line, in this process."""
    handler = signal.getsignal(signal.SIGTERM)

    def answer(line: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_command(main, line.split())
        return int(ended.value.code or 0), capsys.readouterr().err

    yield answer
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(("line", "status", "message"), WRONG, ids=[line for line, *_ in WRONG])
def test_a_wrong_line_is_answered_with_what_to_do(line, status, message, answered):
    code, text = answered(line)
    assert code == status
    assert text.startswith("error: ") and message in text
    assert "[internal]" not in text and "Traceback" not in text


def test_a_wrong_line_of_a_real_process_ends_it_with_status_2():
    done = run([sys.executable, "-m", "headway.launch.cli", "trian"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'train'?" in done.stderr


@pytest.fixture
def on_path(tmp_path: Path) -> str:
    """A PATH on which `headway` is this one."""
    script = tmp_path / "headway"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headway.launch.cli "$@"\n')
    script.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


IN_BASH = """
source <(headway completion bash)
while read -r line; do
    IFS=' ' read -r -a COMP_WORDS <<< "${line%+}"
    [[ $line == *+ ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _headway_completion headway
    echo "${COMPREPLY[*]}"
done
"""
COMPLETED = [
    ("headway sta", {"status"}),
    ("headway ledger ex", {"export"}),
    ("headway ledger export x --state fi", {"filtered"}),
    ("headway weights gc r --keep", {"--keep", "--keep-version"}),
    ("headway serve --backend.type f", {"fake"}),
    ("headway serve --backend.type = f", {"fake"}),
    ("headway train --type ppo-", {"ppo-code", "ppo-hybrid", "ppo-math"}),
    ("headway train --type rw --rollout.m", set()),
    (
        "headway gateway --executor.max-q",
        {"--executor.max-queued", "--executor.max-queued-per-consumer"},
    ),
    (
        "headway run --trainer.optimizer.l",
        {"--trainer.optimizer.lr", "--trainer.optimizer.loss-scale-window"},
    ),
    ("headway run --config a.yaml +", {"--config", "--help"}),
    ("headway help led", {"ledger"}),
    ("headway config show ppo-m", {"ppo-math"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_settings_and_choices(on_path):
    lines = "\n".join(line for line, _ in COMPLETED)
    done = subprocess.run(
        ["bash", "--norc", "-c", IN_BASH],
        input=f"{lines}\n",
        env=os.environ | {"PATH": on_path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    answers = [set(line.split()) for line in done.stdout.splitlines()]
    assert answers == [wanted for _, wanted in COMPLETED], done.stderr


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("run --config ", "file"),
        ("gateway --tokenizer m", "dir"),
        ("ledger stats --ledger ", "file"),
    ],
)
def test_where_a_file_is_wanted_the_shell_completes_it(words, kind, monkeypatch, capsysbinary):
    line = f"headway {words}"
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    monkeypatch.setenv("_HEADWAY_COMPLETE", "bash_complete")
    with pytest.raises(SystemExit):
        entry()
    assert capsysbinary.readouterr().out.decode().startswith(f"{kind},")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_its_script(shell, capsys):
    script = printed(capsys, "completion", shell)
    assert "_HEADWAY_COMPLETE" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=script, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0


def test_the_states_that_are_offered_are_those_of_the_ledger():
    assert set(STATES) == set(RolloutState.__args__)
