import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.contracts.errors import ServiceError
from headway.runtime.fork_server import ForkServer
from headway.runtime.process import Process, ProcessSpec
from tests.waiting import eventually

LIMIT_S = 30.0
PROGRAM = '''
"""What the processes of these tests run."""
import atexit, json, os, random, signal, sys, time
import numpy

LOADED_BY = os.getpid()

if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "tell":
        known = sys.modules.get("marker")
        draws = [random.random(), float(numpy.random.rand())]
        print(json.dumps({
            "argv": sys.argv, "pid": os.getpid(), "group": os.getpgrp(), "loaded_by": known and
            known.LOADED_BY, "env": os.environ.get("COLOUR"), "home": os.environ.get("HOME"),
            "cwd": os.getcwd(), "draws": draws, "stdin": sys.stdin.read(),
            "command": open("/proc/self/cmdline").read().strip("\\0"),
            "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        }))
        atexit.register(print, "ended well")
    elif what == "exit":
        sys.exit(int(rest[0]))
    elif what == "raise":
        raise RuntimeError("so it goes")
    elif what == "sleep":
        print("asleep", flush=True)
        time.sleep(600)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "marker.py").write_text("import os\nLOADED_BY = os.getpid()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def template(folder: Path):
    template = ForkServer(["marker", "numpy", "there_is_no_such_module"])
    yield template
    template.close()


def start(template: ForkServer | None, log: Path, *arguments: str, **env: str) -> Process:
    argv = [sys.executable, "-m", "program", *arguments]
    return Process(ProcessSpec("program", argv, log, env), template)


def told(log: Path) -> dict:
    return __import__("json").loads(log.read_text().splitlines()[0])


def test_a_fork_is_the_process_that_a_fresh_start_would_be(template, folder):
    logs = [folder / "forked.log", folder / "fresh.log"]
    for log, source in zip(logs, (template, None), strict=True):
        process = start(source, log, "tell", "a b", COLOUR="red")
        assert process.wait(LIMIT_S) == 0
        assert told(log)["pid"] == told(log)["group"] == process.pid
        assert log.read_text().splitlines()[1] == "ended well"
    forked, fresh = map(told, logs)
    assert forked["argv"][1:] == fresh["argv"][1:] == ["tell", "a b"]
    assert forked["command"].split() == fresh["command"].replace("\0", " ").split()
    for name in ("env", "home", "cwd", "stdin", "interrupts"):
        assert forked[name] == fresh[name]
    assert forked["env"] == "red"
    assert forked["loaded_by"] not in (None, forked["pid"])  # it did not import this itself
    assert fresh["loaded_by"] is None


def test_forks_draw_different_numbers(template, folder):
    draws = []
    for number in range(2):
        log = folder / f"{number}.log"
        assert start(template, log, "tell").wait(LIMIT_S) == 0
        draws += told(log)["draws"]
    assert len(set(draws)) == 4


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [(("exit", "7"), 7, ""), (("raise",), 1, "RuntimeError: so it goes"), (("exit", "0"), 0, "")],
)
def test_the_exit_status_is_heard(template, folder, arguments, code, line):
    process = start(template, folder / "log", *arguments)
    assert process.wait(LIMIT_S) == code
    assert process.exit_code() == code
    assert line in process.log_tail()


def test_signals_reach_a_fork_and_its_status_tells_which(template, folder):
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start(template, folder / "log", "sleep")
        assert process.exit_code() is None and process.wait(0.01) is None
        process.signal(number)
        assert process.wait(LIMIT_S) == -number


def test_forks_end_with_their_template(template, folder):
    log = folder / "log"
    process = start(template, log, "sleep")
    eventually(lambda: "asleep" in log.read_text())
    template.close()
    assert process.wait(LIMIT_S) == -signal.SIGTERM
    eventually(lambda: not Path(f"/proc/{process.pid}").exists())
    with pytest.raises(ServiceError, match="the process template ended"):
        start(template, log, "sleep")


def test_forks_end_with_who_started_the_template(folder):
    program = (
        "import sys; from pathlib import Path; from headway.runtime.fork_server import ForkServer;"
        "from headway.runtime.process import Process, ProcessSpec;"
        "t = ForkServer(['marker']); spec = ProcessSpec('p', [sys.executable, '-m', 'program',"
        "'sleep'], Path(sys.argv[1]));"
        "print(Process(spec, t).pid, flush=True); sys.stdin.read()"
    )
    log = folder / "log"
    command = [sys.executable, "-c", program, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        eventually(lambda: "asleep" in log.read_text())
        parent.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_modules_that_start_threads_are_imported_by_each_process_itself(folder):
    (folder / "threaded.py").write_text(
        "import os, threading, time\nLOADED_BY = os.getpid()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    template = ForkServer(["threaded", "marker"])
    try:
        process = start(template, folder / "log", "tell", "x")
        assert process.wait(LIMIT_S) == 0
        assert told(folder / "log")["loaded_by"] is None
        assert told(folder / "log")["pid"] == process.pid
    finally:
        template.close()


def test_other_programs_are_started_as_ever(template, folder):
    process = Process(ProcessSpec("echo", ["echo", "hello"], folder / "log"), template)
    assert process.wait(LIMIT_S) == 0
    assert (folder / "log").read_text() == "hello\n"
    assert os.getpgid(0) != process.pid
