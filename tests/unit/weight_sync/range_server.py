"""An HTTP server that counts what it gives, and can misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[["Handler", bytes], bool]
"""Given the request and what would be answered; true if it answered by itself."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: RangeServer

    def do_GET(self) -> None:
        wanted = self.headers.get("range")
        self.server.requests.append((self.path, wanted, dict(self.headers)))
        file = self.server.root / self.path.removeprefix(self.server.prefix).lstrip("/")
        content = file.read_bytes() if file.is_file() else None
        self.first, self.total = 0, len(content or b"")
        if content is not None and wanted is not None:
            self.first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            content = content[self.first : last + 1]
        fault = self.server.fault
        if fault is not None and fault(self, content or b""):
            return
        if content is None:
            self.answer(404, b"")
        elif wanted is None:
            self.answer(200, content)
        elif not content:
            self.answer(416, b"")
        else:
            self.answer(206, content, {"content-range": self.content_range(content)})

    def content_range(self, content: bytes) -> str:
        return f"bytes {self.first}-{self.first + len(content) - 1}/{self.total}"

    def answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, cut: int = 0
    ) -> None:
        """Answer, without the last `cut` bytes, and then hang up."""
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.server.num_bytes += len(content) - cut
        self.wfile.write(content[: len(content) - cut])
        if cut:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Tests look at `requests`."""


class RangeServer(ThreadingHTTPServer):
    """Serves a directory below a prefix; use it as a context."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, root: Path, prefix: str = "", fault: Fault | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.prefix = prefix
        self.fault = fault
        self.requests: list[tuple[str, str | None, dict[str, str]]] = []
        self.num_bytes = 0
        """Of bodies."""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are what many tests want."""

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
