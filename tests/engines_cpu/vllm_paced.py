"""A vLLM worker that takes a while for each step: `--worker-cls vllm_paced.PacedWorker`.

The tests have to meet a request in the middle. A tiny model samples faster than vLLM's server, on a busy
machine, can stream: the engine would be done before the first token has arrived.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEP_S = 0.01


class PacedWorker(CPUWorker):
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Sleep, and let the cores to the server."""
        time.sleep(STEP_S)
        return super().execute_model(*args, **kwargs)
