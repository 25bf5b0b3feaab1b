"""A real SGLang over two nodes, each a process of this machine: the server's, and a later one's."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import BackendError
from headway.runtime.config import load_config
from headway.runtime.process import Process, ProcessSpec
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.sglang.backend import SGLangBackend
from tests.integration.real_engines import error_of, needs, show
from tests.integration.test_sglang_real import ARGS, ENV, PYTHON, TOLERANCE, Policies, request

pytestmark = [*needs("sglang"), pytest.mark.asyncio]


@pytest.fixture
def policies(tmp_path: Path) -> Iterator[Policies]:
    policies = Policies(tmp_path)
    yield policies
    policies.publisher.close()


async def test_an_engine_spans_two_nodes(policies: Policies, tmp_path: Path) -> None:
    folder = str(policies.folders[0])
    settings = {
        "model": {"path": folder, "dtype": "float32"},
        "backend": {
            "type": "sglang",
            "python": str(PYTHON),
            "args": {**ARGS, "--tp-size": 2},
            "env": {**ENV, "SGLANG_CPU_OMP_THREADS_BIND": f"0|{os.cpu_count() - 1}"},
            "log_file": str(tmp_path / "first.log"),
        },
    }
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def words(rank: int) -> list[str]:
        flags = f'{{"--nnodes": 2, "--node-rank": {rank}, "--dist-init-addr": "localhost:{port}"}}'
        return ["--config", str(file), f"--backend.args={flags}"]

    first = load_config(ServerConfig, words(0))
    argv = [sys.executable, "-m", "inference_server", *words(1)]
    later = Process(ProcessSpec("a later node", argv, tmp_path / "later.log"))
    backend = SGLangBackend(first.backend, first.model, 0, TextTokenizer(folder))
    try:
        await backend.start()
        for version in (0, 1, 2):
            if version:
                meta = policies.publish()
                staged = await asyncio.to_thread(backend.stage, meta, policies.reader())
                await backend.swap(staged)
            asked = request(version, 20)
            response = await backend.generate(asked)
            assert response.version_runs == [(version, 0, 20)]
            error = error_of(response, policies.replayed(asked, response))
            show(f"version {version} over two nodes: max error {error:.1e}")
            assert error < TOLERANCE
        await asyncio.to_thread(later.stop, 0.0)
        with pytest.raises(BackendError):  # and none hangs
            async with asyncio.timeout(60.0):
                await backend.generate(request(3, 20))
    finally:
        await backend.aclose()
        await asyncio.to_thread(later.stop, 0.0)
