"""SGLang 0.5.23's contract over real HTTP, decoding one token per `step()` of the test.

Tokens count up from the prompt's last; their logprob is minus the version that sampled them, so that a
wrong stamp shows. As in SGLang, a step that was launched is read with the next one: `in_flight` tokens
survive an in-place pause and are stamped with the version that serves when they are read.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(eq=False)
class Running:
    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    in_flight: list[tuple[int, float]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    retractions: int = 0
    is_waiting: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rid(self) -> str:
        return self.body.get("rid", "")

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class StandIn:
    """One engine; its attributes are the switches of a test."""

    def __init__(self, label: str = "default", max_running: int = 64) -> None:
        self.label = label
        self.max_running = max_running
        self.has_spans = True
        self.has_sessions = True
        self.can_thin_streams = True
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.info: dict[str, Any] = {
            "max_req_input_len": 250,
            "context_length": None,
            "max_total_num_tokens": 4096,
            "disable_overlap_schedule": False,
            "enable_deterministic_inference": False,
            "incremental_streaming_output": False,
            "speculative_algorithm": None,
        }
        self.paused: str | None = None
        self.session = False
        self.calls: list[tuple[str, Any]] = []
        self.running: list[Running] = []
        self.arrived = asyncio.Condition()
        self.url = ""

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._route)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def asked(self, path: str) -> list[Any]:
        """Bodies that were sent to a path."""
        return [body for asked, body in self.calls if asked == path]

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(lambda: len(self.running) == count)

    def step(self, count: int = 1) -> None:
        """Launch a step for all and read the one before."""
        for _ in range(count):
            live = [one for one in self.running if one.finish is None][: self.max_running]
            for one in live:
                before = len(one.in_flight)
                self._launch(one)
                is_pipelined = not self.info["disable_overlap_schedule"]
                for _ in range(before if is_pipelined else len(one.in_flight)):
                    self._read(one)

    def _launch(self, one: Running) -> None:
        position = len(one.tokens) + len(one.in_flight)
        if position < one.body["sampling_params"]["max_new_tokens"]:
            token = (one.body["input_ids"][-1] + position + 1) % 60
            one.in_flight.append((token, -float(self.label)))

    def _read(self, one: Running) -> None:
        token, logprob = one.in_flight.pop(0)
        if one.finish is not None:
            return
        one.tokens.append(token)
        one.logprobs.append(logprob)
        params = one.body["sampling_params"]
        if not params["ignore_eos"] and token in params["stop_token_ids"]:
            one.finish = {"type": "stop", "matched": token}
        elif len(one.tokens) == params["max_new_tokens"]:
            one.finish = {"type": "length", "length": len(one.tokens)}
        one.notify()

    def _relabel(self, label: str) -> None:
        for one in self.running:
            if one.tokens:
                one.events.append((self.label, len(one.tokens)))
        self.label = label

    def _abort(self, one: Running) -> None:
        if one.finish is None:
            one.finish = {"type": "abort", "message": "Aborted", "status_code": None}
            one.notify()

    # Routes.

    async def _route(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        path = request.path
        self.calls.append((path, body))
        if path == "/generate":
            return await self._generate(request, body)
        handler = getattr(self, "_on" + path.replace("/", "_"), None)
        if handler is None:
            return web.Response(status=404)
        return handler(body or {})

    def _on_ping(self, body: Any) -> web.Response:
        return web.Response()

    def _on_server_info(self, body: Any) -> web.Response:
        return web.json_response(self.info)

    def _on_model_info(self, body: Any) -> web.Response:
        return web.json_response({"weight_version": self.label, "is_generation": True})

    def _on_v1_loads(self, body: Any) -> web.Response:
        return web.json_response({"loads": [{"num_used_tokens": 17, "num_running_reqs": 1}]})

    def _on_update_weight_version(self, body: Any) -> web.Response:
        self._relabel(body["new_version"])
        return web.json_response({"success": True, "new_version": self.label})

    def _on_pause_generation(self, body: Any) -> web.Response:
        self.paused = body["mode"]
        for one in self.running:
            if self.paused == "abort":
                self._abort(one)
            if self.paused == "retract" and one.finish is None:
                while one.in_flight:
                    self._read(one)
                one.retractions += bool(one.tokens)
        return web.json_response({"status": "ok", "message": "paused"})

    def _on_continue_generation(self, body: Any) -> web.Response:
        self.paused = None
        return web.json_response({"status": "ok", "message": "continued"})

    def _on_abort_request(self, body: Any) -> web.Response:
        for one in self.running:
            if body.get("abort_all") or one.rid == body.get("rid"):
                self._abort(one)
        return web.Response()

    def _on_flush_cache(self, body: Any) -> web.Response:
        return web.Response(status=400 if self.running else 200)

    def _on_update_weights_from_disk(self, body: Any) -> web.Response:
        if self.refusal is not None:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        self._relabel(body["weight_version"])
        return web.json_response(
            {"success": True, "message": "Succeeded", "num_paused_requests": 0}
        )

    def _on_init_weights_update_group(self, body: Any) -> web.Response:
        return web.json_response({"success": True, "message": "joined"})

    def _on_destroy_weights_update_group(self, body: Any) -> web.Response:
        message = "The group to be destroyed does not exist."
        return web.json_response({"success": False, "message": message}, status=400)

    def _on_begin_weight_update(self, body: Any) -> web.Response:
        if not self.has_sessions:
            return web.Response(status=404)
        self.session = True
        return web.json_response({"success": True, "message": "Success"})

    def _on_end_weight_update(self, body: Any) -> web.Response:
        self.session = False
        return web.json_response({"success": True, "message": "Success"})

    def _on_update_weights_from_distributed(self, body: Any) -> web.Response:
        if self.refusal is not None:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        if self.has_sessions and not self.session:
            message = "must run between begin_weight_update() and end_weight_update()"
            return web.json_response({"success": False, "message": message}, status=400)
        if "weight_version" in body:
            self._relabel(body["weight_version"])
        return web.json_response({"success": True, "message": "Succeeded"})

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body["sampling_params"]
        if "stream_interval" in params and not self.can_thin_streams:
            return web.json_response({"error": "unknown field `stream_interval`"}, status=400)
        if body["input_ids"] == [0]:  # the trial at the start
            one = Running(body, [1], [0.0], finish={"type": "length", "length": 1})
            return web.json_response(self._output(one))
        one = Running(body)
        async with self.arrived:
            self.running.append(one)
            self.arrived.notify_all()
        try:
            if body.get("stream"):
                return await self._stream(request, one)
            while one.finish is None:
                await one.changed.wait()
            return web.json_response(self._output(one))
        finally:
            async with self.arrived:
                self.running.remove(one)
                self.arrived.notify_all()

    async def _stream(self, request: web.Request, one: Running) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        interval = one.body["sampling_params"].get("stream_interval", 1)
        sent = 0
        while True:
            unsent = len(one.tokens) - sent
            if one.finish or (sent == 0 < unsent) or unsent >= interval:
                sent = len(one.tokens)
                await response.write(f"data: {json.dumps(self._output(one))}\n\n".encode())
            if one.finish:
                break
            await one.changed.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _output(self, one: Running) -> dict[str, Any]:
        columns = list(zip(one.logprobs, one.tokens, [None] * len(one.tokens), strict=True))
        prompt = one.body["input_ids"]
        meta: dict[str, Any] = {
            "id": one.rid,
            "finish_reason": one.finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(one.tokens),
            "cached_tokens": 1,
            "weight_version": self.label,
            "num_retractions": one.retractions,
            "input_token_logprobs": [],
            "output_token_logprobs": columns,
        }
        start = one.body.get("logprob_start_len")
        if start is not None:
            scores = [[-0.5 * i, prompt[i], None] for i in range(start, len(prompt))]
            meta["input_token_logprobs"] = [[None, *scores[0][1:]], *scores[1:]]
        top = one.body.get("top_logprobs_num", 0)
        if top:
            meta["output_top_logprobs"] = [[row] * top for row in columns]
            meta["input_top_logprobs"] = [
                None if row[0] is None else [row] * top for row in meta["input_token_logprobs"]
            ]
        if self.has_spans and one.finish is not None:
            meta["weight_versions"] = self._spans(one)
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
        return {"text": "", "output_ids": one.tokens, "meta_info": meta}

    def _spans(self, one: Running) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*one.events, (self.label, len(one.tokens))]:
            start = spans[-1]["end"] if spans else 0
            if not spans or end > start:
                spans.append({"version": version, "start": start, "end": end})
        return spans
