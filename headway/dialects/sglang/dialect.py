"""State of SGLang's API between requests, over one `ServedModel`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from headway import __version__
from headway.contracts.types import LLMDelta, PolicyVersion
from headway.dialects.request_ids import RequestIds
from headway.dialects.served_model import ServedModel, all_of, merged
from headway.dialects.sglang.pulled_checkpoints import PulledCheckpoints
from headway.dialects.sglang.samples import (
    Renderer,
    SampleOutput,
    read_body,
)
from headway.dialects.sglang.types import GenerateBody
from headway.runtime.offload import offload, size_of

FLUSH_TICK_S = 0.02
DENSE_TOKENS = 256
"""Up to this length a stream has a chunk per token, then one per length / this."""
MAX_LORA_RANK = 512
"""The highest that vLLM can be given; there is none here."""
ServerInfo = dict[str, Any]
ONE_PROCESS: ServerInfo = {
    **{"tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1},
    **{"nnodes": 1, "node_rank": 0, "base_gpu_id": 0, "gpu_id_step": 1},
    "enable_memory_saver": False,
}


class SGLangDialect:
    """One model as SGLang's clients see it: its name, its load, labels of its weights."""

    def __init__(
        self,
        model: ServedModel,
        ids: RequestIds,
        label: Callable[[PolicyVersion], str],
        model_path: str,
        served_name: str | None = None,
        dtype: str = "auto",
    ) -> None:
        """
        Args:
            label: the text by which clients know a version.
            model_path: directory with the model's configuration, and its tokenizer if it has one.
            served_name: of the model; None takes its path.
            dtype: of the weights.
        """
        self.model_path = model_path
        """Directory of the weights that serve."""
        self.pulled = PulledCheckpoints(model_path)
        self._model = model
        self._ids = ids
        self._label = label
        self._folder = model_path
        self._served_name = served_name
        self._dtype = dtype
        self._started = time.time()

    @property
    def label(self) -> str:
        """Label of the weights that serve."""
        return self._label(self._model.version)

    async def generate(
        self, body: GenerateBody, session: str | None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer to a body that does not stream.

        Args:
            session: requests of one session are best served by one server.
        """
        asked = await offload(size_of(body), read_body, body, self._model, session)
        write = self._renderer().write
        with self._ids.claim(asked.rids):
            responses = await all_of(self._model, [sample.request for sample in asked.samples])
        outputs = [SampleOutput.of(response) for response in responses]
        size = sum(len(output.tokens) for output in outputs)
        answers = await offload(size, lambda: list(map(write, asked.samples, outputs)))
        return answers if asked.is_list else answers[0]

    async def stream(
        self, body: GenerateBody, session: str | None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Chunks, each with all that its sample has got so far.

        So each repeats all before it: the longer the sample, the rarer its chunks, unless the client
        says how often it wants them (`stream_interval`).
        """
        asked = await offload(size_of(body), read_body, body, self._model, session)
        write = self._renderer().write
        outputs = [SampleOutput() for _ in asked.samples]
        shown = [0] * len(outputs)
        with self._ids.claim(asked.rids):
            requests = [sample.request for sample in asked.samples]
            async with aclosing(merged(self._model, requests)) as parts:
                async for index, part in parts:
                    sample, output = asked.samples[index], outputs[index]
                    if isinstance(part, LLMDelta):
                        output.add(part)
                        length = len(output.tokens)
                        interval = sample.sampling.stream_interval or 1 + length // DENSE_TOKENS
                        if length - shown[index] < interval:
                            continue
                        shown[index] = length
                    else:
                        output = SampleOutput.of(part)
                    place = {"index": index} if asked.is_list else {}
                    yield {**write(sample, output), **place}

    async def flush(self, timeout_s: float) -> bool:
        """Drop shared prefixes, waiting this long for a moment when nothing runs."""
        deadline = time.monotonic() + timeout_s
        while not (flushed := await self._model.flush()):
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(FLUSH_TICK_S)
        return flushed

    def model_info(self) -> ServerInfo:
        """`/model_info`."""
        return {
            "model_path": self.model_path,
            "served_model_name": self._served_name or self.model_path,
            "tokenizer_path": self._folder if self._model.tokenizer is not None else None,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.label,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            **_architecture(Path(self._folder)),
        }

    def vllm_config(self) -> ServerInfo:
        """Return what vLLM's clients read of `/server_info?config_format=json`."""
        most = self._model.max_adapters
        return {
            "model_config": {
                "model": self.model_path,
                "dtype": self._dtype,
                "max_model_len": self._model.max_context,
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": {
                "world_size": 1,
                "tensor_parallel_size": 1,
                "data_parallel_size": 1,
            },
            "lora_config": {"max_loras": most, "max_lora_rank": MAX_LORA_RANK} if most else None,
            "weight_transfer_config": None,
        }

    def server_info(self, host: str, port: int) -> ServerInfo:
        """Return `/server_info`; of SGLang's own flags, those that clients compare.

        To them it is one process with one GPU, whatever engines are behind it.

        Args:
            host: address of this service that was called.
            port: likewise.
        """
        context = self._model.max_context
        return {
            **self.model_info(),
            "dtype": self._dtype,
            "host": host,
            "port": port,
            **ONE_PROCESS,
            "context_length": context,
            "max_total_num_tokens": self._model.load().kv_capacity_tokens,
            "max_req_input_len": None if context is None else context - 1,
            "startup_time": self._started,
            "internal_states": [self.load()],
            "version": __version__,
        }

    def load(self) -> ServerInfo:
        """Return the current load in SGLang's words; throughput is the mean over the time with work."""
        load = self._model.load()
        throughput = load.generated_tokens / load.busy_s if load.busy_s else 0.0
        capacity = load.kv_capacity_tokens
        return {
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.queued,
            "num_used_tokens": load.kv_tokens,
            "max_total_num_tokens": capacity,
            "token_usage": load.kv_tokens / capacity if capacity else load.kv_usage,
            "gen_throughput": throughput,
            "last_gen_throughput": throughput,
            "queues": {
                "waiting": load.queued,
                "paused": load.running if self._model.is_paused else 0,
                "retracted": 0,
            },
        }

    def old_load(self) -> list[ServerInfo]:
        """Return the current load as SGLang did before `/v1/loads`: one row per data parallel rank."""
        load = self._model.load()
        return [
            {
                "dp_rank": 0,
                "num_reqs": load.running + load.queued,
                "num_waiting_reqs": load.queued,
                "num_tokens": load.kv_tokens,
            }
        ]

    def _renderer(self) -> Renderer:
        model = self._model
        return Renderer(self._label, model.tokenizer, model.version, time.monotonic())


def _architecture(folder: Path) -> ServerInfo:
    file = folder / "config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    return {
        "model_type": settings.get("model_type"),
        "architectures": settings.get("architectures"),
    }
