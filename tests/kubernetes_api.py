"""Kubernetes' API for one Deployment's scale, with the shapes that a real one answers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/apis/apps/v1/namespaces/rl/deployments/headway-server/scale"


class KubernetesApi:
    """What a Deployment is to have, and what was asked."""

    def __init__(self, replicas: int, resized: Callable[[int], None] = lambda count: None) -> None:
        """
        Args:
            resized: called with each new number of pods.
        """
        self.replicas = replicas
        self.tokens: list[str | None] = []
        """Authorization of each call."""
        self.sizes: list[int] = []
        """Numbers that it was set to."""
        self.answer: tuple[int, Any] | None = None
        """Status and body of every call; None answers as a Deployment that is there."""
        self._resized = resized

    def handle(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        """Answer one call."""
        self.tokens.append(headers.get("authorization"))
        if self.answer is not None:
            return self.answer
        if path != PATH:
            return 404, failure(404, "NotFound", f'deployments.apps "{path}" not found')
        if method == "PATCH":
            assert headers["content-type"] == "application/merge-patch+json"
            self.replicas = json.loads(body)["spec"]["replicas"]
            self.sizes.append(self.replicas)
            self._resized(self.replicas)
        # A 0 is left out, as by every field with `omitempty`.
        spec = {"replicas": self.replicas} if self.replicas else {}
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": "headway-server", "namespace": "rl", "resourceVersion": "71"},
            "spec": spec,
            "status": {"replicas": self.replicas, "selector": "app.kubernetes.io/component=server"},
        }


def failure(code: int, reason: str, message: str) -> dict[str, Any]:
    """Return a `Status`, as the API answers when it refuses."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


@contextmanager
def serving(api: KubernetesApi, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve it; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            status, told = api.handle(self.command, self.path, self.headers, self.rfile.read(size))
            content = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PATCH = do_GET

        def log_message(self, *ignored: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
