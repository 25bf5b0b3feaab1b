"""LoRA adapters of an SGLang engine (`--enable-lora`)."""

from __future__ import annotations

from pathlib import Path

from inference_server.backends.engine_process import EngineProcess
from inference_server.backends.sglang.responses import body_of, expect_success

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules that may be adapted: SGLang sets memory aside for each."""


class SGLangAdapters:
    """`AdapterLoader` by SGLang's routes."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    async def load_adapter(self, name: str, folder: Path) -> int:
        """See `AdapterLoader`."""
        body = {"lora_name": name, "lora_path": str(folder)}
        expect_success(await self._engine.post("/load_lora_adapter", body))
        return 0  # its name is enough

    async def unload_adapter(self, name: str, number: int) -> None:
        """See `AdapterLoader`."""
        body_of(await self._engine.post("/unload_lora_adapter", {"lora_name": name}))
