"""A real SGLang on the CPU passes the suite of all backends: `make test-sglang`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import GenerationBackend
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.testing import FIRST_VERSION, GenerationBackendContract
from tests.integration.real_engines import needs
from tests.integration.test_sglang_real import ARGS, ENV, FORWARD_S, PYTHON
from tests.numeric.models import save_model, write_char_tokenizer

pytestmark = needs("sglang")


class TestSGLang(GenerationBackendContract):
    """The first backend starts an engine, a second one attaches to its URL."""

    timeout_s = 120.0

    def save_model(self, folder: Path) -> None:
        save_model(folder, "llama")
        write_char_tokenizer(folder)

    @asynccontextmanager
    async def serving(self, model_path: Path) -> AsyncIterator[GenerationBackend]:
        first = getattr(type(self), "served", None)
        if first is None:
            log = str(model_path.parent / "sglang.log")
            config = SGLangConfig(python=str(PYTHON), args=ARGS, env=ENV, log_file=log)
        else:
            config = SGLangConfig(url=first.backend._engine.url)
        model = ModelConfig(path=str(model_path), dtype="float32")
        tokenizer = TextTokenizer(str(model_path))
        backend = SGLangBackend(config, model, FIRST_VERSION, tokenizer)
        await backend.start()
        try:
            await backend._engine.post("/slow_down", {"forward_sleep_time": FORWARD_S})
            yield backend
        finally:
            await backend.aclose()
