"""A real SGLang on the CPU passes the suite that `headway engine check` runs: `make test-sglang`."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig
from inference_server.backends.sglang.backend import SGLangBackend
from tests.integration.real_engines import needs, show
from tests.integration.test_sglang_real import ARGS, ENV, FORWARD_S, PYTHON
from tests.numeric.models import save_model, write_char_tokenizer

pytestmark = needs("sglang")


async def test_a_real_engine_keeps_its_promises(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(model, "llama")
    write_char_tokenizer(model)
    log = str(tmp_path / "sglang.log")
    config = SGLangConfig(python=str(PYTHON), args=ARGS, env=ENV, log_file=log)
    backend = SGLangBackend(config, ModelConfig(path=str(model), dtype="float32"), 3)
    await backend.start()
    try:
        await backend._engine.post("/slow_down", {"forward_sleep_time": FORWARD_S})
        status, told = await engine_check(backend._engine.url, "--scratch", str(tmp_path))
    finally:
        await backend.aclose()
    show(told)
    assert status == 0, told
    assert told.splitlines()[-1] == "28 hold, 0 do not, 0 left out"


async def engine_check(url: str, *options: str) -> tuple[int | None, str]:
    """Run the command; return its status and what it printed."""
    command = ["-m", "headway.launch.cli", "engine", "check", url, *options]
    run = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=STDOUT)
    told, _ = await run.communicate()
    return run.returncode, told.decode()
