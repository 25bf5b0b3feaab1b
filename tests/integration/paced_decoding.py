"""For `modules` of a server: decode steps of its embedded backend take `STEP_S` at least.

A tiny model ends a sequence before a test can act on a busy machine; so it is met in the middle.
"""

from __future__ import annotations

import time

from inference_server.backends.embedded.decode_loop import DecodeLoop

STEP_S = 0.003
step = DecodeLoop.step


def paced_step(loop: DecodeLoop) -> None:
    step(loop)
    time.sleep(STEP_S)


DecodeLoop.step = paced_step  # type: ignore[method-assign]
