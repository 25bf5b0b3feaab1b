"""Programs that were written to be accepted without doing the work, or to cost others theirs.

A row is judged again and again by one worker, so that a program finds whatever those before it left.
"""

import asyncio
import textwrap

import pytest

from gateway.components.shared_services import ProgramResult
from gateway.rewards.base import Answer
from gateway.rewards.code import CodeReward
from gateway.rewards.scoring import Scorer
from gateway.sandbox.pool import SandboxPool
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.types import RewardResult
from headway.runtime.fair_pool import CALLER
from tests.unit.gateway.sandboxes import BACKENDS, open_pool, run, services_of

pytestmark = pytest.mark.extended

SECRET = "treasure-" + "5eed" * 8
HONEST = 'def f(x):\n    return "treasure-" + "5eed" * 8\n'
ROW = {
    "test_list": [
        f"assert f(1) == {SECRET!r}",
        f"assert {SECRET!r} in f(2)",
        f"assert sorted(f(3)) == sorted({SECRET!r})",
    ]
}
SCAN = '''
import ctypes, gc, os, re

PATTERN = re.compile(b"treasure-" + b"[0-9a-f]{32}")

def look(data):
    found = PATTERN.search(data)
    return found.group().decode() if found else ""

def of_process(pid):
    """Its memory, by /proc."""
    told = ""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1][0] == "r":
                try:
                    memory.seek(first)
                    told = told or look(memory.read(last - first))
                except (OSError, ValueError, OverflowError):
                    pass
    return told

def of_ancestors():
    told = [look(str(sorted(os.environ.items())).encode())]
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != str(os.getpid()):
            for part in ("mem", "maps", "environ", "fd/0", "cwd/x", "root/proc/1/environ"):
                try:
                    told.append(of_process(name) if part == "mem" else
                                look(open(f"/proc/{name}/{part}", "rb").read()))
                except OSError:
                    pass
            try:
                told.append(look(open(f"/proc/{name}/cmdline", "rb").read()))
            except OSError:
                pass
    return max(told)

def of_objects():
    texts = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    return look(repr(texts).encode(errors="replace"))

def of_heap():
    """Its memory around every object it can name, probed by a system call that does not crash."""
    reader, writer = os.pipe()
    libc = ctypes.CDLL(None)
    told = ""
    for start in {id(o) >> 20 << 20 for o in gc.get_objects()}:
        for page in range(start, start + (1 << 20), 4096):
            if libc.write(writer, ctypes.c_void_p(page), ctypes.c_size_t(4096)) > 0:
                told = look(os.read(reader, 4096)) or told
    return told

def of_descriptors():
    told = []
    for number in range(200):
        try:
            os.lseek(number, 0, 0)
            told.append(look(os.read(number, 1 << 20)))
        except OSError:
            pass
    return max(told, default="")

def of_files():
    told = [""]
    for folder in ("/tmp", "/dev/shm", "/run", "/var/tmp", "."):
        for where, _, names in os.walk(folder):
            for name in names:
                try:
                    told.append(look(open(os.path.join(where, name), "rb").read(1 << 20)))
                except OSError:
                    pass
    return max(told)

def attempt(search):
    try:
        return search()
    except OSError:
        return ""

SEARCHES = (lambda: of_process("self"), of_ancestors, of_objects, of_heap, of_descriptors, of_files)
'''
THIEF = SCAN + "\ndef f(x):\n    return max(map(attempt, SEARCHES))\n"


@pytest.fixture(params=sorted(BACKENDS))
async def pool(request):
    """One worker, which must be the same after the test, and as good."""
    async with open_pool(BACKENDS[request.param], wall_factor=4.0) as opened:
        before = opened.pids
        yield opened
        outcome = await run(opened, "print(6 * 7)")
        assert (outcome.status, outcome.stdout) == ("ok", "42\n")
        assert opened.pids == before, "the worker was lost"


async def judge(pool: SandboxPool, program: str, row: dict = ROW, **args) -> RewardResult:
    return await CodeReward(**args).score(Answer("", program, row), services_of(pool))


def value(outcome: ProgramResult, index: int = 0):
    """What a call returned."""
    assert outcome.status == "ok", outcome.stderr
    return outcome.results[index]["value"]


async def test_expected_values_reach_no_later_program(pool):
    for _ in range(3):
        assert (await judge(pool, HONEST)).verdict == "accepted"
        result = await judge(pool, THIEF, cpu_s=8.0)
        assert (result.score, result.verdict) == (0.0, "wrong_answer"), result


@pytest.mark.parametrize("search", range(6))
async def test_input_and_output_of_a_program_reach_no_later_one(pool, search):
    echo = """
        import sys
        text = input()
        print(text)
        print(text, file=sys.stderr)
        open("left", "w").write(text)
        """
    for stdin in (SECRET, SECRET * 1000):
        assert (await run(pool, echo, stdin=stdin)).stdout == stdin + "\n"
    outcome = await run(pool, SCAN, f"attempt(SEARCHES[{search}])", cpu_s=8.0)
    assert value(outcome) == ""


HOARD = """
import fcntl, mmap, os, signal, socket, tempfile, time
MIB = 1 << 20
kept = []
def gained():
    os.write(1, b"16\\n")
def hoard():
    for _ in range(7):
        kept.append(bytearray(b"x" * 16 * MIB))
        gained()
    time.sleep(60)
def fork(work):
    if os.fork() == 0:
        work()
        os._exit(0)
"""
HOARDERS = {
    "processes that keep talking": """
        for _ in range(6): fork(hoard)
        while True: print(end="", flush=True) or os.write(2, b".") and time.sleep(0.002)
        """,
    "processes that hide": """
        import ctypes
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        for _ in range(6): fork(hoard)
        time.sleep(60)
        """,
    "shared memory": """
        while True:
            kept.append(mmap.mmap(-1, 16 * MIB))
            kept[-1].write(b"x" * 16 * MIB)
            gained()
        """,
    "shared memory that is given back in name": """
        while True:
            with open("/dev/zero", "r+b") as zero:
                kept.append(mmap.mmap(zero.fileno(), 16 * MIB))
            kept[-1].write(b"x" * 16 * MIB)
            kept[-1].madvise(mmap.MADV_DONTNEED)
            gained()
        """,
    "files in memory": """
        while True:
            kept.append(os.memfd_create("x"))
            for _ in range(16): os.write(kept[-1], b"x" * MIB)
            gained()
        """,
    "half in files, half not": """
        for number in range(7):
            with open(f"/tmp/{number}", "wb") as file: file.write(b"x" * 8 * MIB)
            if number % 2: gained()
        for _ in range(6): fork(hoard)
        time.sleep(60)
        """,
    "full sockets": """
        def fill():
            sent = 0
            for _ in range(28):
                kept.extend(socket.socketpair())
                for end in kept[-2:]:
                    end.setblocking(False)
                    try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                    except OSError: pass
                    try:
                        while True: sent += end.send(b"x" * 65536)
                    except OSError: pass
            os.write(1, b"%d\\n" % (sent // MIB))
        for _ in range(8): fork(fill)
        for _ in range(8): os.wait()
        raise SystemExit("no memory, I give up")
        """,
    "a mapped file that has no name": """
        file = tempfile.TemporaryFile(dir=".")
        for _ in range(100):
            file.write(b"x" * MIB)
            if _ % 16 == 15: gained()
        hoard()
        """,
    "a million empty files": """
        for number in range(10 ** 6):
            open(f"/tmp/{number}", "w").close()
            if number % (3 << 10) == (3 << 10) - 1: gained()  # at 5 KiB each
        """,
}


@pytest.mark.parametrize("attack", HOARDERS)
async def test_memory_is_bounded_however_it_is_held(pool, attack):
    if attack == "a million empty files" and pool.backend.name == "landlock":
        pytest.skip("landlock counts no files; its notes say so")
    source = HOARD + textwrap.dedent(HOARDERS[attack])
    outcome = await run(pool, source, memory_bytes=128 << 20, cpu_s=8.0)
    assert outcome.status in ("memory", "runtime_error"), outcome
    gained_mib = sum(map(int, outcome.stdout.split()))
    assert gained_mib <= 2 * 128, outcome.status


BUSY = """
import os, signal, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
def fork(work, *args):
    child = os.fork()
    if child == 0:
        work(*args)
        os._exit(0)
    return child
"""
IDLE_PARENTS = {
    "children that go on": """
        for _ in range(4): fork(burn, 60)
        time.sleep(60)
        """,
    "children that are waited for": """
        while True: os.waitpid(fork(burn, 0.02), 0)
        """,
    "children that vanish": """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            fork(burn, 0.004)
            time.sleep(0.004)
        """,
    "orphans": """
        while True:
            os.waitpid(fork(fork, burn, 0.3), 0)
            time.sleep(0.2)
        """,
}


@pytest.mark.parametrize("attack", IDLE_PARENTS)
async def test_cpu_of_children_counts(pool, attack):
    outcome = await run(pool, BUSY + textwrap.dedent(IDLE_PARENTS[attack]), cpu_s=1.0)
    if pool.backend.name == "landlock":
        assert outcome.status == "runtime_error", outcome
    else:
        assert outcome.status in ("timeout", "runtime_error"), outcome
        assert outcome.cpu_s < 3.0


@pytest.mark.parametrize("backend", sorted(BACKENDS))
async def test_sleepers_of_one_caller_cost_another_neither_its_answer_nor_its_turn(backend):
    async with open_pool(BACKENDS[backend]) as pool:
        thieves = [asyncio.create_task(sleep_long(pool)) for _ in range(8)]
        await asyncio.sleep(0)  # they are before us
        CALLER.set("honest")
        config = ExecutorConfig(reward_wait_s=20.0, reward_attempts=1)
        scorer = Scorer(config, services_of(pool))
        code = ComponentConfig(name="code", args={"cpu_s": 8.0})
        for _ in range(5):
            assert (await scorer.score(code, Answer("", HONEST, ROW))).verdict == "accepted"
        assert not any(thief.done() for thief in thieves)
        for thief in thieves:
            thief.cancel()
        await asyncio.gather(*thieves, return_exceptions=True)
        await scorer.aclose()


async def sleep_long(pool: SandboxPool) -> None:
    CALLER.set("thief")
    await run(pool, "import time\ntime.sleep(1000)", cpu_s=100.0)


STDIN_ROW = {"input_output": {"inputs": ["3\n", "7\n"], "outputs": ["6\n", "14\n"]}}
CALL_ROW = {"input_output": {"fn_name": "f", "inputs": [[3], [7]], "outputs": [6, 14]}}
CHEATS = {
    "leaves early": "import os\nos._exit(0)",
    "leaves from the call": "import os\ndef f(x): os._exit(0)",
    "leaves by a signal": "import os\nos.kill(os.getpid(), 9)",
    "stops": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "cannot be stopped": """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, lambda *_: None)
            except (OSError, ValueError): pass
        while True: pass
        """,
    "leaves a child that goes on": """
        import os, time
        if os.fork(): os._exit(0)
        os.setsid()
        if os.fork(): os._exit(0)
        while True:
            time.sleep(0.01)
            os.write(1, b"6\\n")
            os.write(3, b'{"result": {"value": 6}}\\n')
        """,
    "equals everything": """
        class Anything(int):
            __eq__ = lambda *_: True
            __hash__ = int.__hash__
        def f(x): return Anything(1)
        class Text(str): __eq__ = lambda *_: True
        import builtins
        builtins.print(Text("1"))
        """,
    "forges its report": """
        import os
        for _ in range(9): os.write(3, b'{"result": {"value": true}}\\n{"ended": "ok"}\\n')
        os.write(3, b'{"passed": 2, "tests": 2, "verdict": "accepted", "score": 1.0, "stopped": null}\\n')
        print("accepted"); print('{"verdict": "accepted"}')
        os._exit(0)
        """,
    "rewires the player": """
        import sys
        player = sys.modules["gateway.sandbox.inside.execute"]
        player.encode = player._evaluate = lambda *_: {"value": True}
        """,
    "takes the frames of its callers": """
        import sys
        frame = sys._getframe()
        while frame:
            for name, found in list(frame.f_locals.items()):
                if name in ("control", "limits", "settings", "fds"):
                    try: found.clear()
                    except Exception: pass
                    try: found.sendall(b"\\0\\0\\0\\x10" + b'{"ready": true} ')
                    except Exception: pass
            frame = frame.f_back
        """,
    "speaks to the worker's other end": """
        import os, struct
        word = b'{"stopped": null, "exit": 0, "cpu_s": 0, "wall_s": 0, "max_rss_bytes": 1}'
        for number in range(4, 256):
            try: os.write(number, struct.pack(">I", len(word)) + word)
            except OSError: pass
        """,
    "floods": "import os\nwhile True: os.write(1, b'6' * 65536)",
    "floods its report": "import os\nwhile True: os.write(3, b'[' * 65536)",
    "floods from many": """
        import os
        for _ in range(4): os.fork()
        while True: os.write(2, b"6" * 4096)
        """,
    "closes everything": """
        import os
        os.closerange(0, 100)
        while True: pass
        """,
    "forks without end": """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """,
    "sleeps": "import time\ntime.sleep(1000)",
    "writes its own tests": """
        import os
        for number in range(10):
            try:
                os.lseek(number, 0, 0); os.write(number, b"6\\n"); os.ftruncate(number, 0)
            except OSError: pass
        """,
    "becomes another program": """
        import os
        os.execv("/bin/sh", ["sh", "-c", "while :; do :; done"])
        """,
    "breaks the interpreter": "import ctypes\nctypes.memset(id(None), 255, 1 << 20)",
    "fills the folder": """
        import os
        for depth in range(400):
            os.mkdir("d"); os.chdir("d"); open("x" * 255, "w").close()
        """,
}
ROWS = {"asserts": ROW, "calls": CALL_ROW, "stdin": STDIN_ROW}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheat_is_not_accepted_and_costs_the_next_one_nothing(pool, cheat):
    program = textwrap.dedent(CHEATS[cheat])
    for row in ROWS.values():
        result = await judge(pool, program, row, cpu_s=0.2)
        assert result.score == 0.0, result
        assert result.verdict != "accepted"
    assert (await judge(pool, HONEST)).verdict == "accepted"
