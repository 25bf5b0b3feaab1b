"""A generation server that lies, and a verifier that does.

    python -m tests.attack.liars server --gateway URL --ready-file FILE
    python -m tests.attack.liars verifier --ready-file FILE

The server reports itself like an honest one, and tells one lie after the other; `GET /told` says how
often it told each. The verifier answers with what the path names.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from headway.contracts.http import paths

HEARTBEAT_S = 0.2
PIECE = b" " * 65_536

Answer = tuple[int, bytes]


def generation(req: dict[str, Any], **changes: Any) -> Answer:
    """An answer of three tokens to a request, but for some changes."""
    honest = {
        "rid": req["rid"],
        "output_tokens": [4, 5, 6],
        "output_logprobs": [-1.0] * 3,
        "version_runs": [[0, 0, 3]],
        "stop_reason": "length",
        "latency_s": 0.1,
        "ttft_s": 0.1,
    }
    return 200, json.dumps(honest | changes).encode()


def refusal(status: int, code: str) -> Answer:
    body = {"code": code, "message": "no " * 200_000, "retryable": False}
    return status, json.dumps(body).encode()


MANY = {"output_tokens": [4] * 200_000, "output_logprobs": [-1.0] * 200_000}
LIES: dict[str, Callable[[dict[str, Any]], Answer]] = {
    "a token beyond the vocabulary": lambda req: generation(req, output_tokens=[4, 2**30, 5]),
    "a negative token": lambda req: generation(req, output_tokens=[4, -1, 5]),
    "a version that was never published": lambda req: generation(req, version_runs=[[999, 0, 3]]),
    "a negative version": lambda req: generation(req, version_runs=[[-7, 0, 3]]),
    "versions of twenty million tokens": lambda req: generation(
        req, version_runs=[[0, 0, 20_000_000]]
    ),
    "too many tokens": lambda req: generation(req, **MANY, version_runs=[[0, 0, 200_000]]),
    "no token": lambda req: generation(
        req, output_tokens=[], output_logprobs=[], version_runs=[], stop_reason="stop"
    ),
    "a logprob of 55": lambda req: generation(req, output_logprobs=[-1.0, 55.0, -1.0]),
    "a logprob that is none": lambda req: generation(req, output_logprobs=[-1.0, "x", -1.0]),
    "another request's answer": lambda req: generation(req, rid="another"),
    "a page": lambda req: (200, b"<html>" * 1000),
    "a refusal": lambda req: refusal(400, "data"),
    "a refusal of the token": lambda req: refusal(401, "unauthorized"),
    "an error that nobody knows": lambda req: refusal(500, "x" * 1000),
    "no room": lambda req: refusal(429, "queue_full"),
    "nothing that ends": lambda req: (200, b""),
}

SCORE = {"score": 1.0}
JUDGEMENTS: dict[str, Any] = {
    "count": [SCORE, SCORE],
    "text": {"score": "high"},
    "huge": {"score": 1e39},
    "verdict": {"score": 1.0, "verdict": "splendid"},
    "details": {"score": 1.0, "details": {"text": "x" * 900_000}},
    "many-details": {"score": 1.0, "details": {"list": [[]] * 200_000}},
    "members": SCORE | {str(number): number for number in range(60_000)},
    "end-of-many": {"action": "end"} | {str(number): number for number in range(10_000)},
    "rewards-of-many": {"action": "end", "turn_rewards": {str(at): "x" for at in range(16_000)}},
    "endless-game": {"action": "continue", "messages": [{"role": "user", "content": "1" * 900_000}]},
    "huge-end": {"action": "end", "reward": 1e39},
    "detailed-end": {"action": "end", "reward": 1.0, "details": {"text": "x" * 900_000}},
}  # fmt: skip
TEXTS = {
    "nan": b'{"score": NaN}',
    "infinite": b'{"score": 1e400}',
    "nested": b"[" * 500_000,
    "lists": b"[" + b"[]," * 300_000 + b"1]",
    "half-a-pair": b'{"score": 1.0, "details": {"text": "\\ud800"}}',
}


class Handler(BaseHTTPRequestHandler):
    """Answers in HTTP/1.1."""

    protocol_version = "HTTP/1.1"
    server: Liar

    def do_GET(self) -> None:
        self.answer(200, json.dumps(self.server.told).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == paths.GENERATE:
            self.lie(json.loads(body))
        elif self.server.is_verifier:
            self.score(self.path.strip("/"))
        else:
            self.answer(404, b"{}")

    def lie(self, req: dict[str, Any]) -> None:
        name = self.server.next_lie()
        status, content = LIES[name](req)
        if content:
            self.answer(status, content)
        else:
            self.go_on(PIECE, 0.0)

    def score(self, name: str) -> None:
        if name == "never":
            self.server.over.wait()
        elif name == "endless":
            self.go_on(PIECE, 0.0)
        elif name == "drops":
            self.go_on(b" ", 0.05)
        elif name == "failing":
            self.answer(500, b"x" * 500_000)
        elif name in TEXTS:
            self.answer(200, TEXTS[name])
        else:
            self.answer(200, json.dumps(JUDGEMENTS[name]).encode())

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(content)

    def go_on(self, piece: bytes, pause_s: float) -> None:
        """A body in chunks, for as long as somebody reads."""
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            while not self.server.over.wait(pause_s):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Liar(ThreadingHTTPServer):
    """Either of the two."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, is_verifier: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_verifier = is_verifier
        self.over = threading.Event()
        self.told: Counter[str] = Counter()
        self._lies: Iterator[str] = cycle(LIES)
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def next_lie(self) -> str:
        with self._lock:
            name = next(self._lies)
            self.told[name] += 1
        return name

    def report(self, gateway: str) -> None:
        """Like a server that is well, with the version that all begin with."""
        began = time.monotonic()
        while not self.over.wait(HEARTBEAT_S):
            report = {
                "server_id": "liar",
                "url": self.url,
                "version": 0,
                "uptime_s": time.monotonic() - began,
                "max_running": 64,
                "max_context_tokens": 100_000,
            }
            with suppress(httpx.HTTPError):
                httpx.post(gateway + paths.SERVERS, json=report, trust_env=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["server", "verifier"])
    parser.add_argument("--gateway")
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    liar = Liar(options.kind == "verifier")
    if options.gateway:
        threading.Thread(target=liar.report, args=(options.gateway,), daemon=True).start()
    draft = options.ready_file.with_suffix(".draft")
    draft.write_text(json.dumps({"url": liar.url}))
    draft.rename(options.ready_file)
    liar.serve_forever()


if __name__ == "__main__":
    main()
