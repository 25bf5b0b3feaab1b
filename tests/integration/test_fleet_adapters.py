"""Clients of vLLM's, SGLang's and OpenAI's APIs load adapters through a gateway and use them.

Each answer is scored by `peft`'s merge of the adapter that it names: whatever server it came from.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax

from headway.contracts.config.model import ModelConfig
from headway.launch.quickstart import task
from tests.integration.driving import kill
from tests.integration.version_fleet import LIMIT_S, PROMPT, Fleet, sampling
from tests.integration.version_model import SHAPE
from tests.numeric.adapters import merged_reference, save_adapter
from tests.waiting import eventually
from weight_sync.model_dir import load_model

SHORT_RUN = ("test_adapters_come_and_go_with_servers_under_load",)
"""What `make test` runs of these."""
TOKENS = 16


class Adapted:
    """A fleet over a plain model, and adapters of it: `v1`, `v2` and so on."""

    def __init__(self, folder: Path) -> None:
        self.fleet = Fleet(folder, 2, write_model=write_plain_model)
        self.score = cache(self._score)

    def adapter(self, name: str) -> Path:
        """The directory of an adapter."""
        folder = self.fleet.weights / name
        if not folder.exists():
            lora = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "down_proj"]}
            save_adapter(folder, self.fleet.model, int(name.removeprefix("v")), **lora)
        return folder

    def load(self, name: str) -> None:
        body = {"lora_name": name, "lora_path": str(self.adapter(name)), "load_inplace": False}
        answer = self.fleet.sglang.post("/v1/load_lora_adapter", body)
        assert answer.status_code == 200, answer.text
        assert f"'{name}' added successfully" in answer.text

    def unload(self, name: str) -> None:
        answer = self.fleet.sglang.post("/v1/unload_lora_adapter", {"lora_name": name})
        assert answer.status_code == 200, answer.text

    def names(self) -> list[str]:
        return [model.id for model in self.fleet.openai.models.list().data][1:]

    def ask(self, name: str) -> None:
        """A completion of an adapter; its logprobs are those of the merged model."""
        answer = self.fleet.openai.completions.create(
            model=name, prompt=PROMPT, max_tokens=TOKENS, temperature=1.0, logprobs=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        choice = answer.choices[0]
        assert choice.logprobs is not None
        self._check(name, choice.model_extra["token_ids"], choice.logprobs.token_logprobs)

    def stream(self, name: str | None) -> None:
        """A stream of SGLang's."""
        body = {"input_ids": PROMPT, "sampling_params": sampling(TOKENS), "return_logprob": True}
        *_, last = self.fleet.sglang.stream(**body, **({"lora_path": name} if name else {}))
        logprobs = [logprob for logprob, _, _ in last["meta_info"]["output_token_logprobs"]]
        self._check(name, last["output_ids"], logprobs)

    def _check(self, name: str | None, tokens: list[int], logprobs: list[float]) -> None:
        assert len(tokens) == len(logprobs) == TOKENS
        assert logprobs == pytest.approx(self.score(name, tuple(tokens)), abs=1e-3)

    def _score(self, name: str | None, tokens: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logits = self._reference(name)(torch.tensor([[*PROMPT, *tokens]])).logits[0]
        rows = log_softmax(logits[len(PROMPT) - 1 : -1], -1)
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    @cache  # noqa: B019 - one of these per test
    def _reference(self, name: str | None) -> Any:
        return merged_reference(self.fleet.model, name and self.adapter(name))

    @contextmanager
    def used(self, *names: str) -> Iterator[None]:
        """Clients that use these adapters, and the base, without a pause."""
        is_over = threading.Event()

        def repeat(name: str) -> None:
            while not is_over.is_set():
                self.ask(name)
                self.stream(name)
                self.stream(None)

        with ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(repeat, name) for name in names for _ in range(2)]
            try:
                yield
            finally:
                is_over.set()
            for one in tasks:
                one.result(LIMIT_S)


def write_plain_model(folder: Path) -> Path:
    """A model directory with random weights."""
    task.write_model(folder, SHAPE)
    load_model(ModelConfig(path=str(folder), init_from_scratch=True)).save_pretrained(folder)
    return folder


@pytest.fixture
def adapted(tmp_path: Path) -> Iterator[Adapted]:
    adapted = Adapted(tmp_path)
    with closing(adapted.fleet):
        yield adapted


def test_adapters_come_and_go_with_servers_under_load(adapted: Adapted) -> None:
    fleet = adapted.fleet
    for name in ("v1", "v2", "v3"):
        adapted.adapter(name)
    adapted.load("v1")
    adapted.load("v2")
    assert adapted.names() == ["v1", "v2"]
    spread = [abs(a - b) for a, b in zip(*_scores(adapted, "v1", "v2"), strict=True)]
    assert math.fsum(spread) > 1.0, "or the test would see nothing"
    with adapted.used("v1", "v2"):
        fleet.kill(0, 0)
        adapted.load("v3")
        fleet.join()  # it reads all three before it serves
        adapted.ask("v3")
        fleet.kill(0, 1)
    for name in ("v1", "v2", "v3"):  # of the one that came last
        adapted.ask(name)
        adapted.stream(name)
    adapted.unload("v1")
    assert adapted.names() == ["v2", "v3"]
    body = {"input_ids": PROMPT, "sampling_params": sampling(4), "lora_path": "v1"}
    refused = fleet.sglang.post("/generate", body)
    assert refused.status_code == 400 and "'v1' is not loaded" in refused.text


def test_what_one_server_cannot_read_none_serves(adapted: Adapted) -> None:
    fleet = adapted.fleet
    torn = shutil.copytree(adapted.adapter("v1"), fleet.weights / "torn")
    file = torn / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused = fleet.sglang.post(
        "/load_lora_adapter", {"lora_name": "torn", "lora_path": str(torn)}
    ).json()
    assert refused["success"] is False and "nothing changed" in refused["error_message"]
    assert refused["loaded_adapters"] == {} and adapted.names() == []
    put = fleet.sglang.request("PUT", "/v1/adapters/v1", json={"path": str(adapted.adapter("v1"))})
    assert put.json() == {"name": "v1", "version": 1}
    kill(fleet.runs[0], "gateway")
    fleet.runs[0].watch()
    fleet.runs[0].process("gateway").wait_ready(LIMIT_S)
    eventually(lambda: len(fleet.ready()) == 2, LIMIT_S, "they report again")
    assert adapted.names() == ["v1"]
    adapted.ask("v1")


def _scores(adapted: Adapted, *names: str) -> list[list[float]]:
    return [adapted.score(name, tuple(range(TOKENS))) for name in names]
