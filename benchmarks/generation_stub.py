"""A generation server that costs next to nothing: it answers the same tokens after a fixed time.

    python benchmarks/generation_stub.py --delay-ms 20 --gateway http://127.0.0.1:8000

Prints its URL, and reports to the gateway as a real server does. Enough HTTP/1.1 for our own clients
and no more: one request at a time on a connection, with a content-length.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import aiohttp
import uvloop

from headway.contracts.http.paths import SERVERS
from headway.contracts.http.servers import ServerReport
from headway.contracts.types import LLMResponse

TOKENS = 16
HEARTBEAT_S = 1.0
RID = b'"rid":"'
ANSWER = (
    LLMResponse(
        rid="",
        output_tokens=[5 + place % 8 for place in range(TOKENS)],  # of the smallest vocabulary
        output_logprobs=[-0.5] * TOKENS,
        version_runs=[(0, 0, TOKENS)],
        stop_reason="stop",
        latency_s=0.0,
        ttft_s=0.0,
    )
    .model_dump_json()
    .encode()
)
BEFORE_RID, _, AFTER_RID = ANSWER.partition(RID)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._seen = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().index(b"content-length:") + 15
        if len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return
        self._seen = b""
        rid = body.partition(RID)[2].partition(b'"')[0]
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._answer, rid)
        else:
            self._answer(rid)

    def _answer(self, rid: bytes) -> None:
        """The request's own name is what a gateway believes an answer by."""
        if self._transport is not None and not self._transport.is_closing():
            answer = BEFORE_RID + RID + rid + AFTER_RID
            self._transport.write(HEAD % len(answer) + answer)


async def run(delay_s: float, gateway: str | None) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(delay_s), "127.0.0.1", 0, backlog=4096)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    print(url, flush=True)
    async with aiohttp.ClientSession() as session:
        while gateway is not None:
            report = ServerReport(server_id="stub", url=url, version=0)
            async with session.post(gateway + SERVERS, json=report.model_dump()) as answer:
                answer.raise_for_status()
            await asyncio.sleep(HEARTBEAT_S)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--gateway", default=None)
    options = parser.parse_args()
    uvloop.run(run(options.delay_ms / 1e3, options.gateway))
