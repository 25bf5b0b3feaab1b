"""Whether the commands that a page shows would be understood: subcommands, flags, files, routes."""

from __future__ import annotations

import io
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise

import click
import yaml

from headway.contracts.http import paths
from headway.launch.cli import root
from headway.runtime.config import merge_sources
from headway.runtime.settings_command import SettingsCommand
from tests.contract.page_settings import check_settings
from tests.contract.pages import ROOT

KEYWORDS = {
    "do",
    "done",
    "else",
    "eval",
    "export",
    "fi",
    "for",
    "if",
    "in",
    "then",
    "until",
    "while",
    "!",
}
FOREIGN = {
    "bash",
    "cd",
    "chmod",
    "cp",
    "docker",
    "echo",
    "git",
    "grep",
    "helm",
    "kubectl",
    "ls",
    "mkdir",
    "nvidia-smi",
    "pre-commit",
}
FOREIGN |= {
    "redis-cli",
    "redis-server",
    "sbatch",
    "sleep",
    "source",
    "sudo",
    "tail",
    "uvicorn",
    "wait",
    "jq",
}
"""Programs of others, whose arguments are not ours to check."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RULES = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
TARGETS = {target for rule in RULES for target in rule.split()}
ENTRIES = {"inference_server": "serve", "trainer": "train"}
"""`python -m` of these is a command of `headway`."""


def check_commands(text: str) -> None:
    """Raise at the first command of a block that would not be understood."""
    for words in commands_of(text):
        program, *arguments = words
        if program.startswith("$("):
            check_commands(program.removeprefix("$(").removesuffix(")"))
            continue
        program = program.rpartition("bin/")[2]  # an environment's own: `.venv/bin/pip`
        if program in FOREIGN or "=" in program:
            continue
        assert program in CHECKS, (
            f"{program} is known to no check: see tests/contract/page_commands.py"
        )
        CHECKS[program](arguments)


class _Lines(io.StringIO):
    """Keeps the end of a line that ends a comment: it ends a command, too."""

    def readline(self, size: int | None = -1, /) -> str:
        line = super().readline(-1 if size is None else size)
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


def commands_of(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell script, without keywords, assignments and redirections."""
    lexer = shlex.shlex(_Lines(text.replace("\\\n", " ")), posix=True, punctuation_chars=";|&()\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words: list[str] = []
    for token in [*lexer, "\n"]:
        if token and not set(token) <= set(";|&()\n"):
            words.append(token)
            continue
        words = [word for word in words if not re.match(r"\d?[<>]", word)]
        while words and (words[0] in KEYWORDS or re.match(r"[A-Z_]+=", words[0])):
            words.pop(0)
        if words and not text_of_loop(words):
            yield words
        words = []


def text_of_loop(words: Sequence[str]) -> bool:
    """`port in 8010 8011`, which stood after `for`."""
    return len(words) > 1 and words[1] == "in"


def check_headway(words: Sequence[str]) -> None:
    """A command of `headway`, its options, and the settings it is given."""
    if words and words[0] == "help":
        words = words[1:]
    command: click.Command = root
    context = click.Context(root, info_name="headway", **root.context_settings)
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, f"headway {' '.join(words)}: no command {rest[0]!r}"
        name = rest.pop(0)
        context = click.Context(found, context, name, **found.context_settings)
        command = found
    if {"--help", "--version"} & set(rest):
        return
    if isinstance(command, SettingsCommand):
        check_process(command, rest)
    else:
        command.make_parser(context).parse_args(rest)


def check_process(command: SettingsCommand, words: Sequence[str]) -> None:
    """Flags of a process; values, too, where its files are there."""
    known = {setting.flag for setting in command.settings(words)} | {"--config"}
    for word in words:
        if word.startswith("--") and not word.startswith("---"):
            flag = word.partition("=")[0]
            assert flag in known or is_in_map(flag, known), f"{command.name}: no setting {flag}"
    files = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--config"]
    for file in files:
        assert (ROOT / file).exists() or "/" not in file, f"no file {file}"
    if all((ROOT / file).exists() for file in files):
        argv = [str(ROOT / word) if word in files else word for word in words]
        check_settings(merge_sources(argv))


def is_in_map(flag: str, known: set[str]) -> bool:
    """`--backend.env.NAME`: a key of a setting that is a map."""
    return any(flag.startswith(f"{setting}.") for setting in known)


def check_python(words: Sequence[str]) -> None:
    """A module or a file."""
    words = [word for word in words if not re.fullmatch(r"-[uWPI]\S*", word)]
    if words[:1] == ["-m"]:
        module, *rest = words[1:]
        assert find_spec(module) is not None, f"no module {module}"
        if module in ENTRIES:
            check_headway([ENTRIES[module], *rest])
    elif words and words[0] not in ("-c", "-", "--version"):
        assert (ROOT / words[0]).exists() or "/" not in words[0], f"no file {words[0]}"


def check_torchrun(words: Sequence[str]) -> None:
    """What is run on each rank."""
    check_python(words[words.index("-m") :])


def check_make(words: Sequence[str]) -> None:
    """Targets."""
    unknown = {word for word in words if "=" not in word and not word.startswith("-")} - TARGETS
    assert not unknown, f"make has no {sorted(unknown)}"


def check_pip(words: Sequence[str]) -> None:
    """Extras of ours."""
    for extras in re.findall(r"(?:headway-rl|\.|\.whl)\[([\w,-]+)\]", " ".join(words)):
        unknown = set(extras.split(",")) - PROJECT["optional-dependencies"].keys()
        assert not unknown, f"no extra {sorted(unknown)}"


def check_curl(words: Sequence[str]) -> None:
    """Routes of ours, and bodies that are JSON."""
    for word in words:
        if match := re.match(r"https?://[^/]+(/v1/[\w/]+)", word):
            known = {route.split()[1] for route in paths.ACCESS}
            assert any(_is_alike(match[1], route) for route in known), f"no route {match[1]}"
    for flag, body in pairwise(words):
        if flag in ("--json", "-d") and not body.startswith("@"):
            assert isinstance(yaml.safe_load(body), dict), body


def _is_alike(path: str, route: str) -> bool:
    pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(route))
    return re.fullmatch(pattern, path) is not None


CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "headway": check_headway,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "curl": check_curl,
}
