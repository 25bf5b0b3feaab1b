"""A process that ends without taking itself apart leaves nothing undone."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, threading
from headway.runtime.ending import end_process

released = threading.Event()
class Kept:
    def __del__(self):
        print("taken apart", end=" ")

kept = Kept()
atexit.register(print, "at exit", end=" ")
def work():
    released.wait()
    print("thread", end=" ")
threading.Thread(target=work).start()
threading.Timer(0.05, released.set).start()
print("begun", end=" ")
end_process(3)
"""


def test_threads_and_exit_functions_come_before_the_end_and_nothing_is_freed():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split(" ") == ["begun", "thread", "at", "exit", ""]


def test_a_broken_pipe_is_told_as_always():
    program = f"import sys; sys.stdout.write('x' * 10)\n{PROGRAM}"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "BrokenPipeError" in process.stderr.read()
    process.stderr.close()
    assert process.wait(60) != 0
