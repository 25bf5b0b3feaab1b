"""A vLLM server without a model: the shapes and manners of a real one over HTTP.

What it answers is in `tests/contract/data/vllm/`. `tests/integration/test_vllm_real.py` runs the backend
against vLLM itself. `budget` holds every request at so many tokens, so that a test can act while it runs.
As a program it takes vLLM's command line and ignores what it has no use for.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import copy
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

SHAPES = Path(__file__).parents[2] / "contract" / "data" / "vllm"
UNLIMITED = 1 << 30
LOGPROB = -0.5


def shape(name: str):
    """A fresh copy of one of the bodies."""
    return copy.deepcopy(json.loads((SHAPES / f"{name}.json").read_text()))


@dataclass(eq=False)
class Running:
    engine_id: str
    prompt: list[int]
    params: dict
    cached: int
    tokens: list[int] = field(default_factory=list)
    spans: list[dict] = field(default_factory=list)
    reason: str | None = None
    match: int | str | None = None
    num_recomputes: int = 0


def packed(array: NDArray[np.uint8]) -> str:
    """An array as vLLM puts it into JSON: a `.npy` file in base64."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def has_weights(path: str) -> bool:
    return any(Path(path).glob("*.safetensors"))


class VLLMStandIn:
    """One engine; everything public is for tests to look at or to turn."""

    def __init__(
        self,
        *,
        vocab_size: int = 61,
        max_model_len: int | None = 256,
        eos: int = 1,
        scale_out: bool = True,
        dev_mode: bool = True,
        logprobs_mode: str = "processed_logprobs",
        device: str = "cuda",
        experts: NDArray[np.uint8] | None = None,
        budget: int = UNLIMITED,
    ) -> None:
        """
        Args:
            experts: [positions, layers, experts of a token], reported with each whole answer.
        """
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos = eos
        self.scale_out = scale_out
        self.dev_mode = dev_mode
        self.logprobs_mode = logprobs_mode
        self.device = device
        self.experts = experts
        self.label = "default"
        self.weights_path: str | None = None
        self.paused: str | None = None
        self.adapters: dict[str, str] = {}
        """Directories of what is loaded, by name."""
        self.places: set[int] = set()
        """Numbers of the adapters in the engine's processes; unloading leaves them there."""
        self._next_adapter = 1
        self.running: list[Running] = []
        self.disconnected = 0
        self.calls: list[tuple[str, dict]] = []
        """Every control verb and every generate body, in order."""
        self.refuse: dict[str, int] = {}
        """Paths answered with this status."""
        self.dies_at: str | None = None
        """The engine process is gone once this path is called."""
        self.is_dead = False
        self._budget = budget
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._rung = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        app = web.Application(middlewares=[self._front])
        post, get = app.router.add_post, app.router.add_get
        get("/health", self._ok)
        get("/v1/models", self._models)
        get("/metrics", self._metrics)
        post("/inference/v1/generate", self._generate)
        if self.dev_mode:
            get("/server_info", self._server_info)
            get("/weight_info", self._weight_info)
            post("/pause", self._pause)
            post("/resume", self._resume)
            post("/abort_requests", self._abort_requests)
            post("/reset_prefix_cache", self._reset_prefix_cache)
            post("/update_weight_version", self._update_weight_version)
            post("/collective_rpc", self._collective_rpc)
            post("/v1/load_lora_adapter", self._load_adapter)
            post("/v1/unload_lora_adapter", self._unload_adapter)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def let(self, budget: int = UNLIMITED) -> None:
        """Requests go on up to this many tokens."""
        self._budget = budget
        self._ring()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a state of this engine."""
        async with asyncio.timeout(5.0):
            while not condition():
                await self._rung.wait()

    def verbs(self) -> list[str]:
        """Control calls so far, without generation."""
        return [path for path, _ in self.calls if not path.startswith(("/inference", "/v1"))]

    def _ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()

    @web.middleware
    async def _front(self, request: web.Request, handler):
        body = await request.json() if request.can_read_body else {}
        if request.method == "POST":
            self.calls.append((request.path_qs, body))
            self._ring()
        if self.dies_at is not None and request.path == self.dies_at:
            self.is_dead = True
        if self.is_dead:
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        if request.path in self.refuse:
            status = self.refuse[request.path]
            return web.json_response(shape("error_internal"), status=status)
        request["body"] = body
        return await handler(request)

    # Generating.

    async def _decode(self, one: Running) -> None:
        params = one.params
        while one.reason is None:
            if self.paused == "keep" or (self.paused is not None and not one.tokens):
                await self._rung.wait()
                continue
            if len(one.tokens) >= self._budget:
                await self._rung.wait()
                continue
            position = len(one.prompt) + len(one.tokens)
            text = f"{one.prompt}:{params.get('seed')}:{position}:{self.weights_path}"
            token = 2 + crc32(text.encode()) % (self.vocab_size - 2)
            if params.get("logit_bias"):  # the biased token is sampled, whatever the bias
                token = int(next(iter(params["logit_bias"])))
            one.tokens.append(token)
            if not one.spans or one.spans[-1]["version"] != self.label:
                one.spans.append({"version": self.label, "start": len(one.tokens) - 1})
            one.spans[-1]["end"] = len(one.tokens)
            if len(one.tokens) >= params["min_tokens"]:
                if token == self.eos and not params["ignore_eos"]:
                    one.reason = "stop"
                elif token in params["stop_token_ids"]:
                    one.reason, one.match = "stop", token
            if one.reason is None and len(one.tokens) >= params["max_tokens"]:
                one.reason = "length"
            self._ring()
            await asyncio.sleep(0)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return web.json_response(shape("error_scale_out"), status=403)
        body = request["body"]
        if "token_ids" not in body:
            return self._error(400, "BadRequestError", "1 validation error: token_ids required")
        name = body.get("model")
        if name is not None and name not in self.adapters:
            return self._error(404, "NotFoundError", f"The model `{name}` does not exist.")
        engine_id = f"generate-tokens-{body['request_id']}"
        params = body["sampling_params"]
        return await self._serve(request, engine_id, body["token_ids"], params)

    async def _serve(self, request, engine_id, prompt, params) -> web.StreamResponse:
        body = request["body"]
        if max(prompt) >= self.vocab_size:
            return self._error(
                400, "BadRequestError", f"Token id {max(prompt)} is out of vocabulary"
            )
        refused = shape("error_paused") if self.paused in ("abort", "wait") else None
        if refused is not None and not body.get("stream"):
            return web.json_response(refused, status=503)
        seen = (body["cache_salt"], tuple(prompt))
        one = Running(engine_id, prompt, params, len(prompt) - 1 if seen in self._seen else 0)
        self._seen.add(seen)
        if refused is not None:
            return await self._stream(request, [refused])
        self.running.append(one)
        self._ring()
        decoding = asyncio.create_task(self._decode(one))
        try:
            if body.get("stream"):
                return await self._stream(request, self._chunks(one))
            await self.until_ended(one)
            return web.json_response(self._body(one, 0, is_stream=False))
        except (asyncio.CancelledError, ConnectionResetError):
            self.disconnected += 1
            raise
        finally:
            decoding.cancel()
            self.running.remove(one)
            self._ring()

    async def until_ended(self, one: Running) -> None:
        while one.reason is None:
            await self._rung.wait()

    async def _chunks(self, one: Running):
        sent = 0
        while True:
            while len(one.tokens) == sent and one.reason is None:
                await self._rung.wait()
            start, sent = sent, len(one.tokens)
            is_last = one.reason is not None
            yield self._body(one, start, is_stream=True)
            if is_last:
                usage = {"prompt_tokens_details": {"cached_tokens": one.cached}}
                yield {"request_id": one.engine_id, "choices": [], "usage": usage}
                return

    async def _stream(self, request: web.Request, events) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if isinstance(events, list):
            for event in events:
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
        else:
            async for event in events:
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _fill(self, answer: dict, one: Running, start: int, is_stream: bool) -> dict:
        choice = answer["choices"][0]
        ended = one.reason is not None
        choice["token_ids"] = one.tokens[start:]
        choice["finish_reason"] = one.reason
        choice["stop_reason"] = one.match
        choice["weight_versions"] = one.spans if ended else None
        if ended and self.experts is not None:
            choice["routed_experts"] = packed(self.experts[: len(one.prompt) + len(one.tokens) - 1])
        if is_stream:
            answer["usage"] = None
        else:
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": one.cached}
        return answer

    def _top(self, one: Running, token: int) -> list[tuple[int, float]]:
        """The sampled token first, then the most likely ones: 0, 1, 2, ..."""
        k = one.params["logprobs"]
        return [(token, LOGPROB), *((i, -0.1 * (i + 1)) for i in range(k) if i != token)]

    def _prompt_logprobs(self, one: Running) -> list | None:
        k = one.params["prompt_logprobs"]
        if k is None:
            return None
        rows = []
        for position, token in enumerate(one.prompt[1:], start=1):
            entry = {str(i): {"logprob": -0.1 * (i + 1), "rank": i + 1} for i in range(k)}
            entry[str(token)] = {"logprob": -float(position), "rank": 9, "decoded_token": "?"}
            rows.append(entry)
        return [None, *rows]

    def _body(self, one: Running, start: int, is_stream: bool) -> dict:
        answer = self._fill(shape("generate"), one, start, is_stream)
        answer["request_id"] = one.engine_id
        if is_stream:
            del answer["prompt_logprobs"]
        else:
            answer["prompt_logprobs"] = self._prompt_logprobs(one)
        answer["choices"][0]["logprobs"]["content"] = [
            {
                "token_id": token,
                "logprob": LOGPROB,
                "rank": 3,
                "top_logprobs": [
                    {"token_id": t, "logprob": p, "rank": None} for t, p in self._top(one, token)
                ],
            }
            for token in one.tokens[start:]
        ]
        return answer

    def _error(self, status: int, kind: str, message: str) -> web.Response:
        body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        return web.json_response(body, status=status)

    # Control.

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        answer = shape("models")
        answer["data"][0]["max_model_len"] = self.max_model_len
        return web.json_response(answer)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=(SHAPES / "metrics.txt").read_text())

    async def _server_info(self, request: web.Request) -> web.Response:
        config = {
            "model_config": {"logprobs_mode": self.logprobs_mode},
            "device_config": {"device": self.device},
            "aux_output_config": {"enable_return_routed_experts": self.experts is not None},
        }
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        self.paused = mode
        if request.query.get("clear_cache", "true") == "true":
            self._drop_caches()
        if mode == "abort":
            self._end(self.running)
        self._ring()
        while mode == "wait" and any(one.tokens for one in self.running):
            await self._rung.wait()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = None
        self._ring()
        return web.json_response({"status": "resumed"})

    def _end(self, some: list[Running]) -> None:
        for one in some:
            one.reason = one.reason or "abort"
        self._ring()

    async def _abort_requests(self, request: web.Request) -> web.Response:
        ids = request["body"].get("request_ids")
        self._end([one for one in self.running if not ids or one.engine_id in ids])
        return web.json_response({"status": "aborted", "aborted": len(ids or self.running)})

    def _drop_caches(self) -> None:
        self._seen.clear()
        for one in self.running:
            one.num_recomputes += 1

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        with_running = request.query.get("reset_running_requests") == "true"
        if self.running and not with_running:
            return web.json_response({"success": False})
        self._drop_caches()
        return web.json_response({"success": True})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.label = request["body"]["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = request["body"]
        if body["method"] == "list_loras":  # a set has no JSON: vLLM writes it as Python does
            return web.json_response({"results": [str(self.places)]})
        if body["method"] == "remove_lora":
            self.places.remove(body["args"][0])
            return web.json_response({"results": ["True"]})
        path = body["kwargs"]["weights_path"]
        if body["method"] != "reload_weights" or not has_weights(path):
            return web.json_response(shape("error_internal"), status=500)
        self.weights_path = path
        return web.json_response({"results": [None]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        name, path = request["body"]["lora_name"], request["body"]["lora_path"]
        if name in self.adapters:
            told = f"The lora adapter '{name}' has already been loaded."
            return self._error(400, "InvalidUserInput", told)
        self.adapters[name] = path
        self.places.add(self._next_adapter)
        self._next_adapter += 1
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = request["body"]["lora_name"]
        if self.adapters.pop(name, None) is None:
            return self._error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--logprobs-mode", required=True)
    parser.add_argument("--enable-scale-out", action="store_true")
    args, _ = parser.parse_known_args()
    engine = VLLMStandIn(
        logprobs_mode=args.logprobs_mode,
        scale_out=args.enable_scale_out,
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
    )
    await engine.start(args.host, args.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
