"""A gateway's service with a policy that follows a script, under a real server, for unmodified agents."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpxClient
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gateway.components.shared_services import (
    NoOutbound,
    NoSandbox,
    Outbound,
    SharedServices,
)
from gateway.ledger.sqlite import SqliteLedger
from gateway.service.app import create_app
from gateway.service.options import ServiceOptions
from gateway.service.service import RolloutService
from gateway.sessions.routes import session_routes
from gateway.sessions.sessions import Sessions
from headway.contracts.codec import decode_groups
from headway.contracts.config.gateway import ExecutorConfig, SessionsConfig
from headway.contracts.http.rollouts import WaitRequest
from headway.contracts.types import LLMRequest, LLMResponse, Trajectory
from headway.text.tokenizer import TextTokenizer
from tests.unit.gateway.games import byte_tokenizer, ids_of, logprob_of
from tests.unit.gateway.generators import ScriptedGenerator
from tests.waiting import until

DEADLINE_S = 20.0
TEMPLATE = """{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
Say = Callable[[str], str]
"""The prompt's text -> what the policy says to it."""


class ScriptedPolicy(ScriptedGenerator):
    """Says what its script says, with logprobs that tell a token's place in the vocabulary."""

    def __init__(self, tokenizer: TextTokenizer, say: Say) -> None:
        super().__init__()
        self.say = say
        self.asked: list[LLMRequest] = []
        self.gate: asyncio.Event | None = None
        """Answers wait for it."""
        self._tokenizer = tokenizer

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        self.asked.append(req)
        self.playing.add(req.rid)
        try:
            version = self.version
            if self.gate is not None:
                await self.gate.wait()
            text = self.say(self._tokenizer.decode(list(req.input_ids), skip_special_tokens=False))
        finally:
            self.playing.discard(req.rid)
        stops = [stop for stop in req.gconfig.stop if stop in text]
        if stops:
            text = text[: text.index(stops[0]) + len(stops[0])]
        tokens = ids_of(text)
        cut = tokens[: req.gconfig.max_new_tokens]
        return LLMResponse(
            rid=req.rid,
            output_tokens=cut,
            output_logprobs=[logprob_of(token) for token in cut],
            version_runs=[(version, 0, len(cut))],
            stop_reason="stop" if len(cut) == len(tokens) else "length",
            stop_match=stops[0] if stops else None,
            latency_s=0.0,
            ttft_s=0.0,
            top_logprobs=[[(token, logprob_of(token))] for token in cut]
            if req.top_logprobs
            else None,
        )


@dataclass
class Place:
    """One open session, with the clients of an agent that was given its URL and key."""

    told: dict[str, Any]
    bench: Bench
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    async def end(self, key: str | None = None, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        path = self.told["end_url"].removeprefix(self.bench.url)
        return await self.bench.post(path, body, key or self.told["api_key"])

    async def rows(self, **end: Any) -> list[Trajectory]:
        """End the session; its trajectories, as a trainer gets them."""
        status, answer = await self.end(**{"reward": 1.0, **end})
        assert (status, answer["state"]) == (200, "ready"), answer
        return await self.bench.rows(self.told["rollout_id"])


@dataclass
class Bench:
    url: str
    http: aiohttp.ClientSession
    policy: ScriptedPolicy
    service: RolloutService
    tokenizer: TextTokenizer
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic
    opened: int = field(default=0)

    async def post(
        self, path: str, body: dict[str, Any], key: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            told = await answer.json()
            return answer.status, told | {"headers": dict(answer.headers)}

    async def open(self, **fields: Any) -> Place:
        self.opened += 1
        asked = {"rollout_id": f"s{self.opened}", "gconfig": {"max_new_tokens": 200}, **fields}
        status, told = await self.post("/v1/sessions", asked)
        assert status == 200, told
        return self.place(told)

    def place(self, told: dict[str, Any]) -> Place:
        """Clients for what a session's opener, or an agent, was told."""
        key = told["api_key"]
        return Place(
            told,
            self,
            self.openai.copy(base_url=told["openai_url"], api_key=key),
            self.anthropic.copy(base_url=told["anthropic_url"], api_key=key),
        )

    async def rows(self, rollout_id: str) -> list[Trajectory]:
        request = WaitRequest(
            delivery_id=f"d-{rollout_id}", count=1, rollout_ids=(rollout_id,), timeout_s=10.0
        )
        payloads, _ = await self.service.wait(request)
        assert payloads is not None
        (group,) = decode_groups(payloads[0])
        return list(group.trajectories)

    async def reason(self, rollout_id: str) -> str:
        """Why a rollout failed, once it has."""
        async with asyncio.timeout(DEADLINE_S):
            while (entry := await self.service.ledger.get(rollout_id)) is None or (  # noqa: ASYNC110
                entry.state in ("queued", "leased")
            ):
                await asyncio.sleep(0.01)
        assert entry.state == "failed"
        return entry.reason or ""

    def reset(self) -> None:
        """A policy that nobody has asked."""
        self.policy.asked.clear()
        self.policy.version, self.policy.gate = 0, None

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, DEADLINE_S)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The app under uvicorn on a free port, on this event loop."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not server.started:
                assert not task.done(), "the server did not start"
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@asynccontextmanager
async def open_bench(
    folder: Path,
    say: Say,
    outbound: Outbound | None = None,
    executor: dict[str, Any] | None = None,
    **sessions: Any,
) -> AsyncIterator[Bench]:
    """A service on a ledger in memory, behind a real server."""
    tokenizer = byte_tokenizer(folder / "tokenizer", TEMPLATE)
    policy = ScriptedPolicy(tokenizer, say)
    config = ExecutorConfig(**(executor or {}))
    desk = Sessions(SessionsConfig(**sessions), config.rollout_timeout_s)

    @asynccontextmanager
    async def open_service() -> AsyncIterator[RolloutService]:
        ledger = SqliteLedger(":memory:")
        await ledger.open("me", 30.0)
        around = ServiceOptions(SharedServices(NoSandbox(), outbound or NoOutbound()), desk)
        service = RolloutService(policy, ledger, tokenizer, config, around)
        await service.start()
        try:
            yield service
        finally:
            await service.aclose()
            await ledger.close()

    app = create_app("a gateway", open_service, 1 << 20, session_routes())
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(app))
        desk.address = url
        http = await stack.enter_async_context(aiohttp.ClientSession())
        openai, anthropic = await _clients(stack)
        yield Bench(url, http, policy, app.state.service, tokenizer, openai, anthropic)


async def _clients(stack: AsyncExitStack) -> tuple[AsyncOpenAI, AsyncAnthropic]:
    """Clients to copy: loading certificates takes longer than most tests."""
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE_S}
    openai = AsyncOpenAI(http_client=DefaultAsyncHttpxClient(verify=False), **options)
    anthropic = AsyncAnthropic(http_client=AnthropicHttpxClient(verify=False), **options)
    await stack.enter_async_context(openai)
    await stack.enter_async_context(anthropic)
    return openai, anthropic
