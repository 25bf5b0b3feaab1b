"""A vLLM server's verbs as calls: generate, pause, abort, update, label.

One method per verb; policies and the order of calls belong to the backend. Tested on vLLM 0.32.0.
Pauses and weights need its dev mode.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import VLLMConfig
from headway.contracts.errors import BackendError, ConfigError, DataError, QueueFull, SyncError
from headway.contracts.types import LLMRequest, PolicyVersion
from inference_server.backends.engine_command_line import EngineCommand
from inference_server.backends.engine_experts import FLAG as EXPERTS_FLAG
from inference_server.backends.engine_experts import EngineExperts
from inference_server.backends.engine_process import EngineProcess, EngineResponse
from inference_server.backends.vllm.wire import (
    GENERATE,
    LogprobsMode,
    OutputChunk,
    engine_id_of,
    generate_body,
    read_chunk,
)

log = logging.getLogger(__name__)

PauseVerb = Literal["abort", "wait", "keep"]

HEALTH = "/health"
WEIGHT_INFO = "/weight_info"
CONTROL_TIMEOUT_S = 30.0
"""Seconds for calls that neither load weights nor wait for running requests."""
UNLABELLED = "default"
PAUSED_TYPE = "ServiceUnavailableError"
"""Type of vLLM's error while it is paused; a full queue has another one."""
SPARE_ADAPTERS = 2
"""Places for adapters beside those that serve. One is for a version that is replaced while its requests
end. The last one stays empty: on a CPU, vLLM 0.32 adds what is there to requests without an adapter."""
MAX_TOP_LOGPROBS = 64
"""Bound of `LLMRequest.top_logprobs`."""


class PausedError(Exception):
    """The engine takes nothing new at the moment; never leaves the backend."""


class BrokenUpdateError(Exception):
    """An update ended in between: the engine's weights are no version. Never leaves the backend."""


class VLLMEngine:
    """One engine, managed or attached."""

    def __init__(self, config: VLLMConfig, model: ModelConfig) -> None:
        self._config = config
        self._command = _command(config, model)
        self._model = model.path
        self._is_updating = False
        self.process = EngineProcess(
            config, self._command, lambda: self.num_tokens, self._live_path
        )
        self.num_tokens = 0
        """Tokens that arrived."""
        self.max_context = 0
        self.logprobs_mode: LogprobsMode | None = None
        self.experts = EngineExperts()
        self.takes_versions = True
        """False if it would go on with the old weights of experts."""

    @property
    def max_running(self) -> int:
        """Requests decoded at once, if configured; 0 if only the engine knows."""
        given = self._config.args.get("--max-num-seqs")
        return int(given) if isinstance(given, int | str) else 0

    async def start(self, version: PolicyVersion) -> PolicyVersion:
        """Start or reach it, and learn what it serves.

        Args:
            version: Of its weights, unless it is labelled already.

        Returns:
            The version that it serves.
        """
        await self.process.start()
        try:
            self.max_context = await self._ask_max_context()
            probe = await self.process.post(GENERATE, {}, CONTROL_TIMEOUT_S)
            if probe.status in (403, 404, 405):
                raise ConfigError(
                    f"vLLM at {self.process.url} runs without --enable-scale-out: it does not tell "
                    "which weights sampled a token; start it with that flag"
                )
            settings = await self._ask_settings()
            self.logprobs_mode = _logprobs_mode(settings.logprobs_mode)
            self.experts = EngineExperts.of_model(self._model, settings.reports_experts)
            self.takes_versions = self.experts.counts is None or settings.device != "cpu"
            return await self._label(version)
        except BaseException:
            await self.process.aclose()
            raise

    # Generating.

    def engine_id(self, request_id: str) -> str:
        """Return the id that `abort` needs for a request."""
        return engine_id_of(request_id)

    async def ask(
        self, request_id: str, req: LLMRequest, salt: str, adapter: str | None = None
    ) -> OutputChunk:
        """The whole answer at once.

        Args:
            adapter: its name there; None is the base.
        Raises:
            PausedError, QueueFull, DataError, BackendError: refused, lost or failed.
        """
        body = generate_body(request_id, req, salt, adapter, is_stream=False)
        answer = await self.process.post(GENERATE, body)
        if not answer.is_ok:
            _refuse(answer.status, answer.json() or answer.text())
        part = read_chunk(answer.json(), req.top_logprobs)
        self.num_tokens += len(part.tokens)
        return part

    async def stream(
        self, request_id: str, req: LLMRequest, salt: str, adapter: str | None = None
    ) -> AsyncGenerator[OutputChunk, None]:
        """The answer as it grows; iterate within `process.guard`.

        Raises:
            PausedError, QueueFull, DataError, BackendError: as `ask`.
        """
        body = generate_body(request_id, req, salt, adapter, is_stream=True)
        async with self.process.stream(GENERATE, body) as lines:
            if isinstance(lines, EngineResponse):
                _refuse(lines.status, lines.json() or lines.text())
            async for event in _events(lines):
                if "error" in event:
                    _refuse(event["error"].get("code") or 500, event)
                part = read_chunk(event, req.top_logprobs)
                self.num_tokens += len(part.tokens)
                yield part

    async def abort(self, engine_ids: Sequence[str]) -> None:
        """End requests with the tokens so far; of no effect on one that is still on its way."""
        if engine_ids:  # none would mean all
            await self._order("/abort_requests", {"request_ids": list(engine_ids)})

    # Pausing.

    async def pause(self, mode: PauseVerb) -> None:
        """Stop between two steps; `wait` returns once what runs has ended.

        Caches are not cleared: it would send frozen requests back to the queue.
        """
        timeout_s = None if mode == "wait" else CONTROL_TIMEOUT_S
        await self._order(f"/pause?mode={mode}&clear_cache=false", None, timeout_s)

    async def resume(self) -> None:
        await self._order("/resume", None)

    async def drop_prefixes(self) -> bool:
        """Drop shared prefixes; false if requests hold some."""
        return bool((await self._order("/reset_prefix_cache", None)).get("success"))

    async def drop_caches(self) -> None:
        """Drop all keys and values: what runs goes back to the queue, to be prefilled again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not (await self._order(path, None)).get("success"):
            raise BackendError("vLLM did not drop its caches; use another update policy")

    # Adapters.

    async def load_adapter(self, name: str, folder: Path) -> int:
        """Load an adapter beside the base, and return its number in the engine's processes.

        Raises:
            SyncError: vLLM refused it.
        """
        before = await self._adapters()
        await self._change("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        return max(await self._adapters() - before, default=0)

    async def unload_adapter(self, name: str, number: int) -> None:
        """Forget an adapter.

        vLLM's own route leaves it in its place, which would fill the last one (`SPARE_ADAPTERS`).

        Raises:
            BackendError: the engine does not answer.
        """
        await self.process.post("/v1/unload_lora_adapter", {"lora_name": name}, CONTROL_TIMEOUT_S)
        await self._order("/collective_rpc", {"method": "remove_lora", "args": [number]})

    async def _adapters(self) -> set[int]:
        """Numbers of the adapters in the engine's processes."""
        answer = await self._order("/collective_rpc", {"method": "list_loras"})
        return {int(number) for number in re.findall(r"\d+", str(answer["results"][0]))}

    # Weights.

    async def load_directory(self, path: str, version: PolicyVersion) -> None:
        """Load a checkpoint and label it.

        Raises:
            BrokenUpdateError: it failed; vLLM takes the old weights apart before it reads.
        """
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._update(
            ("/collective_rpc", reload),
            ("/update_weight_version", {"new_version": str(version)}),
        )

    async def metrics(self) -> str:
        """The text of `/metrics`."""
        answer = await self.process.get("/metrics", self._config.health_timeout_s)
        return answer.content.decode() if answer.is_ok else ""

    def _live_path(self) -> str:
        # `/health` is answered beside the engine; the label comes from within, between two steps.
        return HEALTH if self._is_updating else WEIGHT_INFO

    async def _learn(self, path: str) -> Any:
        answer = await self.process.get(path, CONTROL_TIMEOUT_S)
        if not answer.is_ok:
            raise BackendError(
                f"{self.process.url}{path} answered {answer.status}; this backend needs "
                "vLLM >= 0.32, started with VLLM_SERVER_DEV_MODE=1"
            )
        return answer.json()

    async def _ask_max_context(self) -> int:
        try:
            return int((await self._learn("/v1/models"))["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise BackendError(
                f"{self.process.url}/v1/models names no max_model_len; this backend needs vLLM >= 0.32"
            ) from None

    async def _label(self, version: PolicyVersion) -> PolicyVersion:
        label = (await self._learn(WEIGHT_INFO))["weight_version"]
        if label.isdigit():
            return int(label)  # it was attached to before, and has been updated since
        if label != UNLABELLED:
            raise BackendError(
                f"the weights of the engine at {self.process.url} are labelled {label!r} by "
                "another client; start it again"
            )
        await self._order("/update_weight_version", {"new_version": str(version)})
        return version

    async def _ask_settings(self) -> _Settings:
        answer = await self.process.get("/server_info?config_format=json", CONTROL_TIMEOUT_S)
        info = answer.json() if answer.is_ok else None
        config = (info or {}).get("vllm_config") or {}
        aux = config.get("aux_output_config") or {}
        mode = (config.get("model_config") or {}).get("logprobs_mode")
        reports_experts = bool(aux.get("enable_return_routed_experts"))
        if self.process.is_managed:
            args = {**self._command.args, **self._config.args}
            mode, reports_experts = args["--logprobs-mode"], bool(args.get(EXPERTS_FLAG))
        device = (config.get("device_config") or {}).get("device")
        return _Settings(mode, reports_experts, device)

    async def _order(
        self, path: str, body: Any, timeout_s: float | None = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        answer = await self.process.post(path, body, timeout_s)
        if not answer.is_ok:
            raise BackendError(f"vLLM answered {path} with {answer.status}: {answer.text()}")
        return answer.json() or {}

    async def _update(self, *steps: tuple[str, Any]) -> None:
        self._is_updating = True
        try:
            for path, body in steps:
                await self._change(path, body)
        except (SyncError, BackendError) as error:
            raise BrokenUpdateError(error.message) from error
        finally:
            self._is_updating = False

    async def _change(self, path: str, body: Any) -> None:
        """A step of an update: takes as long as it takes."""
        answer = await self.process.post(path, body)
        if not answer.is_ok:
            raise SyncError(f"vLLM answered {path} with {answer.status}: {answer.text()}")


class _Settings(NamedTuple):
    """Flags that an engine runs with."""

    logprobs_mode: Any
    reports_experts: bool
    device: Any
    """Type of its device; None if it does not tell."""


def _logprobs_mode(mode: Any) -> LogprobsMode | None:
    if mode == "raw_logprobs" or mode == "processed_logprobs":
        return "raw_logprobs" if mode == "raw_logprobs" else "processed_logprobs"
    if mode is not None:
        raise ConfigError(
            f"vLLM runs with --logprobs-mode {mode}; use processed_logprobs or raw_logprobs"
        )
    log.warning("vLLM does not tell its logprobs mode; only plain sampling is served")
    return None


def _command(config: VLLMConfig, model: ModelConfig) -> EngineCommand:
    adapters: dict[str, Any] = {}
    if config.max_adapters:
        adapters = {
            "--enable-lora": True,
            "--max-loras": config.max_adapters + SPARE_ADAPTERS,
            "--max-lora-rank": config.max_adapter_rank,
        }
    return EngineCommand(
        name="vLLM",
        module="vllm.entrypoints.openai.api_server",
        args={
            "--model": model.path,
            "--dtype": model.dtype,
            "--enable-scale-out": True,
            "--enable-prompt-tokens-details": True,
            "--disable-uvicorn-access-log": True,
            "--logprobs-mode": "processed_logprobs",
            "--max-logprobs": MAX_TOP_LOGPROBS,
            **adapters,
        },
        ready_path=HEALTH,
        env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        owned_flags={
            "--model": "model.path",
            "--dtype": "model.dtype",
            "--enable-lora": "backend.max_adapters",
            "--max-loras": "backend.max_adapters",
            "--max-lora-rank": "backend.max_adapter_rank",
            "--logprobs_mode": "--logprobs-mode",
            "--enable_return_routed_experts": EXPERTS_FLAG,
        },
    )


def _refuse(status: int, body: Any) -> NoReturn:
    """Raise what vLLM's answer means."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else str(body)
    if status == 503:
        if isinstance(error, dict) and error.get("type") == PAUSED_TYPE:
            raise PausedError
        raise QueueFull(f"vLLM: {message}")
    if status in (400, 422):
        raise DataError(f"vLLM refused the request: {message}")
    raise BackendError(f"vLLM answered with {status}: {message}")


async def _events(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events, as JSON, up to `[DONE]`."""
    async for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
