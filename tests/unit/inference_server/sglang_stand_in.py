"""SGLang 0.5.23's contract over real HTTP, decoding one token per `step()` of the test.

Tokens count up from the prompt's last; their logprob is minus the number that all live weights hold, so
that a wrong stamp shows, and torn weights give none. As in SGLang, a step that was launched is read with
the next one: `in_flight` tokens survive an in-place pause and are stamped with the version that serves
when they are read. Process groups are real: the stand-in is a rank, on a thread.
"""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from numpy.typing import NDArray
from safetensors.torch import load_file

from headway.contracts.errors import SyncError
from weight_sync.transports.process_group import (
    GroupAddress,
    TensorSpec,
    WeightGroup,
    join_group,
)

GROUP_TIMEOUT_S = 10.0


@dataclass(eq=False)
class Running:
    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    in_flight: list[tuple[int, float]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    retractions: int = 0
    is_doomed: bool = False
    """Aborted while frozen: it ends when it goes on."""
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
            "max_running_requests": max_running,
            "disable_overlap_schedule": False,
            "enable_deterministic_inference": False,
            "incremental_streaming_output": False,
            "speculative_algorithm": None,
            "skip_tokenizer_init": False,
            "enable_return_routed_experts": False,
            "tp_size": 1,
            "dtype": "float32",
        }
        self.weights: dict[str, torch.Tensor] = {"all": torch.tensor(0.0)}
        self.experts: NDArray[np.int32] | None = None
        """[positions, layers, experts of a token]: what it reports to those who ask."""
        self.shows_weights = True
        self.groups: dict[str, WeightGroup] = {}
        self.fails_at: int | None = None
        """Bucket of an update that is received and not loaded."""
        self.holds_at: int | None = None
        """Bucket of an update before which it waits for `go_on`."""
        self.holding = asyncio.Event()
        self.go_on = asyncio.Event()
        self.damages: str | None = None
        """A tensor that arrives with other values."""
        self.num_buckets = 0
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
        runner = self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await self.die()

    async def die(self) -> None:
        """Cut every connection, those of its groups too."""
        await self._runner.cleanup()
        for group in self.groups.values():
            group.close()
        self.groups.clear()

    def asked(self, path: str) -> list[Any]:
        """Bodies that were sent to a path."""
        return [body for asked, body in self.calls if asked == path]

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(lambda: len(self.running) == count)

    def step(self, count: int = 1) -> None:
        """Launch a step for all and read the one before."""
        for _ in range(0 if self.paused else count):
            live = [one for one in self.running if one.finish is None][: self.max_running]
            for one in live:
                before = len(one.in_flight)
                self._launch(one)
                is_pipelined = not self.info["disable_overlap_schedule"]
                for _ in range(before if is_pipelined else len(one.in_flight)):
                    self._read(one)

    @property
    def sampling(self) -> float:
        """The number that all weights hold."""
        ends = {float(end) for t in self.weights.values() for end in (t.min(), t.max())}
        return ends.pop() if len(ends) == 1 else float("nan")

    def _launch(self, one: Running) -> None:
        position = len(one.tokens) + len(one.in_flight)
        if position < one.body["sampling_params"]["max_new_tokens"]:
            token = (one.body["input_ids"][-1] + position + 1) % 60
            one.in_flight.append((token, -self.sampling))

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
        if label == self.label:
            return
        for one in self.running:
            if one.tokens:
                one.events.append((self.label, len(one.tokens)))
        self.label = label

    def _abort(self, one: Running) -> None:
        if self.paused == "in_place":
            one.is_doomed = True
        elif one.finish is None:
            while one.is_doomed and one.in_flight:
                self._read(one)
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
        answer = handler(body or {})
        return await answer if asyncio.iscoroutine(answer) else answer

    def _on_ping(self, body: Any) -> web.Response:
        return web.Response()

    def _on_server_info(self, body: Any) -> web.Response:
        return web.json_response(self.info)

    def _on_model_info(self, body: Any) -> web.Response:
        return web.json_response({"weight_version": self.label, "is_generation": True})

    def _on_v1_loads(self, body: Any) -> web.Response:
        return web.json_response({"loads": [{"num_used_tokens": 17, "num_running_reqs": 1}]})

    def _on_update_weight_version(self, body: Any) -> web.Response:
        if self.label == "default":
            self.weights = {"all": torch.tensor(float(body["new_version"]))}
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
        for one in self.running:
            if one.is_doomed:
                self._abort(one)
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
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        loaded = {name: t for file in files for name, t in load_file(file).items()}
        self.weights = loaded or {"all": torch.tensor(float(body["weight_version"]))}
        self._relabel(body["weight_version"])
        return web.json_response(
            {"success": True, "message": "Succeeded", "num_paused_requests": 0}
        )

    async def _on_init_weights_update_group(self, body: Any) -> web.Response:
        address = GroupAddress(
            body["group_name"],
            body["master_address"],
            body["master_port"],
            body["rank_offset"],
            body["world_size"],
            body["backend"],
        )
        group = await asyncio.to_thread(join_group, address, GROUP_TIMEOUT_S)
        self.groups[body["group_name"]] = group
        return web.json_response({"success": True, "message": "joined"})

    def _on_destroy_weights_update_group(self, body: Any) -> web.Response:
        group = self.groups.pop(body["group_name"], None)
        if group is not None:
            group.close()
            return web.json_response({"success": True, "message": "destroyed"})
        message = "The group to be destroyed does not exist."
        return web.json_response({"success": False, "message": message}, status=400)

    def _on_get_weights_by_name(self, body: Any) -> web.Response:
        if not self.shows_weights:
            return web.json_response({"error": "no such function"}, status=400)
        return web.json_response(self.weights[body["name"]].tolist()[: body["truncate_size"]])

    def _on_begin_weight_update(self, body: Any) -> web.Response:
        if not self.has_sessions:
            return web.Response(status=404)
        self.session = True
        return web.json_response({"success": True, "message": "Success"})

    def _on_end_weight_update(self, body: Any) -> web.Response:
        self.session = False
        return web.json_response({"success": True, "message": "Success"})

    async def _on_update_weights_from_distributed(self, body: Any) -> web.Response:
        if self.has_sessions and not self.session:
            message = "must run between begin_weight_update() and end_weight_update()"
            return web.json_response({"success": False, "message": message}, status=400)
        assert self.paused is not None, "bytes came under running requests"
        assert body["load_format"] == "flattened_bucket"
        number, self.num_buckets = self.num_buckets, self.num_buckets + 1
        if number == self.holds_at:
            self.holding.set()
            await self.go_on.wait()
        specs = [
            TensorSpec(name, dtype, tuple(shape))
            for name, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            )
        ]
        group = self.groups[body["group_name"]]
        try:
            received = await asyncio.to_thread(group.receive_flattened, specs)
        except SyncError as error:
            message = f"Failed to receive weights: {error}"
            return web.json_response({"success": False, "message": message}, status=400)
        self.weights.pop("all", None)
        self.weights |= received
        if self.damages in received:
            self.weights[self.damages] = received[self.damages] + 1
        if number == self.fails_at:
            message = "Failed to load: partially updated"
            return web.json_response({"success": False, "message": message}, status=400)
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
        if self.experts is not None and one.finish and one.body.get("return_routed_experts"):
            computed = self.experts[: len(prompt) + len(one.tokens) - 1]
            meta["routed_experts"] = base64.b64encode(computed.tobytes()).decode()
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
