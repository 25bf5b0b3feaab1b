"""Write the table of docs/servers/engines.md: what the suite of all backends saw on each of them.

    make engines-table

The embedded engine runs here, SGLang and vLLM in environments of their own, on small models.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.engine_check import Result, Results
from tests.integration import test_sglang_real, test_vllm_real
from tests.integration.real_engines import ROOT
from tests.numeric.models import save_model, write_char_tokenizer

PAGE = ROOT / "docs" / "servers" / "engines.md"
EMBEDDED = ROOT / "tests" / "contract" / "test_generation_backends.py"
CELLS = {"ok": "yes", "FAILED": "**no**", "left out": "left out"}
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def main() -> None:
    columns = {"embedded_torch": embedded_results()}
    with tempfile.TemporaryDirectory() as folder:
        for name, serving in (("sglang", serving_sglang), ("vllm", serving_vllm)):
            place = Path(folder) / name
            place.mkdir()
            columns[name] = asyncio.run(results_of(serving(place), place))
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + table(columns) + END + rest.partition(END)[2])


def embedded_results() -> list[Result]:
    results = Results()
    config = ["-c", "/dev/null", "--rootdir", str(ROOT), "-p", "no:asyncio"]
    pytest.main(["-q", *config, f"{EMBEDDED}::TestEmbeddedTorch"], plugins=[results])
    return results.found


async def results_of(serving: AbstractAsyncContextManager[str], folder: Path) -> list[Result]:
    """Return what `headway engine check` finds on an engine."""
    file = folder / "results.json"
    async with serving as url:
        command = ["-m", "headway.launch.cli", "engine", "check", url]
        options = ["--scratch", str(folder), "--json", str(file)]
        run = await asyncio.create_subprocess_exec(sys.executable, *command, *options)
        await run.wait()
    return [Result(**promise) for promise in json.loads(file.read_text())["promises"]]


@asynccontextmanager
async def serving_sglang(folder: Path):
    save_model(folder / "model", "llama")
    write_char_tokenizer(folder / "model")
    real = test_sglang_real
    config = SGLangConfig(
        python=str(real.PYTHON), args=real.ARGS, env=real.ENV, log_file=str(folder / "log")
    )
    backend = SGLangBackend(config, ModelConfig(path=str(folder / "model"), dtype="float32"), 3)
    await backend.start()
    try:
        await backend._engine.post("/slow_down", {"forward_sleep_time": real.FORWARD_S})
        yield backend._engine.url
    finally:
        await backend.aclose()


@asynccontextmanager
async def serving_vllm(folder: Path):
    suite = test_vllm_real.TestVLLM()
    suite.save_model(folder / "model")
    async with suite.serving(folder / "model") as backend:
        yield backend._engine.process.url


def table(columns: dict[str, Sequence[Result]]) -> str:
    """Return Markdown: a row per promise, in the order of the suite."""
    found = {name: {one.promise: one for one in results} for name, results in columns.items()}
    promises = dict.fromkeys(one.promise for results in columns.values() for one in results)
    lines = [f"| promise | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for promise in promises:
        cells = [cell(results.get(promise)) for results in found.values()]
        lines.append(f"| {promise} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(result: Result | None) -> str:
    """What a reader wants to know: yes, no, refused by name, or that it was not asked."""
    if result is None:
        return "not asked"
    if result.mark == "ok" and result.remark:
        return result.remark
    return CELLS[result.mark]


if __name__ == "__main__":
    main()
