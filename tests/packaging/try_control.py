"""Run where only the wheel is installed: the command line answers, a gateway starts, without torch."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headway.runtime.process import Process, ProcessSpec

HEADWAY = str(Path(sysconfig.get_path("scripts")) / "headway")
LIMIT_S = 60.0


def main() -> None:
    """Try all of it."""
    assert find_spec("torch") is None, "torch is installed: the control part must do without"
    for words in (["--version"], ["--help"], ["gateway", "--help"], ["help", "ledger", "export"]):
        subprocess.run([HEADWAY, *words], check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    with TemporaryDirectory() as folder:
        try_gateway(Path(folder))


def try_gateway(folder: Path) -> None:
    """Start a gateway, ask for its health and its page, and end it."""
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    ready = folder / "ready.json"
    command = [HEADWAY, "gateway", "--tokenizer", str(folder), "--ledger", ":memory:"]
    command += ["--service.port", "0", "--service.ready-file", str(ready)]
    gateway = Process(ProcessSpec("gateway", command, folder / "log", {}, ready))
    try:
        url = gateway.wait_ready(LIMIT_S)
        for path in ("/health", "/ui", "/v1/workflows", "/metrics"):
            with urllib.request.urlopen(url + path, timeout=LIMIT_S) as answer:
                assert answer.status == 200, (path, answer.status)
    finally:
        gateway.stop(LIMIT_S)
    assert "Application shutdown complete" in gateway.log_tail(), gateway.log_tail()


if __name__ == "__main__":
    sys.exit(main())
