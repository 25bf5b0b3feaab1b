"""A stand-in engine for `python -m engine_child`: answers on a port, and hangs or dies when told.

GET /health, GET /facts (its flags, environment, and the process that it started), POST /hang,
POST /exit, POST /slow (answers never), POST /long (one long line).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GRANDCHILD = subprocess.Popen(["sleep", "600"])
HANGING = threading.Event()
FOREVER = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if HANGING.is_set():
            FOREVER.wait()
        facts = {
            "argv": sys.argv[1:],
            "grandchild": GRANDCHILD.pid,
            "added": os.environ.get("ADDED"),
        }
        self._answer(facts)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/exit":
            sys.stdout.write("the engine says goodbye\n")
            sys.stdout.flush()
            os._exit(3)
        if self.path == "/slow":
            FOREVER.wait()
        if self.path == "/long":
            return self._answer("x" * 2_000_000)
        HANGING.set()
        self._answer({})

    def _answer(self, body: object) -> None:
        content = json.dumps(body).encode() + b"\n"
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if "--die" in sys.argv:
    sys.stdout.write("no such model\n")
    GRANDCHILD.kill()
    sys.exit(7)
port = int(sys.argv[sys.argv.index("--port") + 1])
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.daemon_threads = True
server.serve_forever()
