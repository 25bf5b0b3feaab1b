"""Adapters over a server's routes: our own, SGLang's, and the names of OpenAI's models."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.contracts.errors import ServiceError
from headway.contracts.http import paths
from headway.contracts.types import LLMResponse
from headway.runtime.server_calls import error_of
from tests.numeric.adapters import save_adapter
from tests.numeric.models import CONTEXT, write_char_tokenizer
from tests.unit.inference_server.test_serving import Served, body, serving
from weight_sync.adapter_dir import WEIGHTS_NAME

GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
PROMPT = [3, 4, 5]
LONG = CONTEXT - len(PROMPT)


@pytest.fixture(scope="module")
def root(llama_dir, tmp_path_factory) -> Path:
    """A model `base` and adapters of it, `a` and `b`."""
    root = tmp_path_factory.mktemp("adapters")
    model = shutil.copytree(llama_dir, root / "base")
    write_char_tokenizer(model)
    for seed, name in enumerate("ab"):
        save_adapter(root / name, model, seed, r=4, lora_alpha=8, target_modules=["v_proj"])
    return root


@asynccontextmanager
async def serving_adapters(root: Path, **backend: Any) -> AsyncIterator[Served]:
    config = {"type": "embedded_torch", "kv_cache_bytes": 1 << 24, "max_adapters": 2, **backend}
    model = {"path": str(root / "base"), "dtype": "float32"}
    async with serving(model=model, backend=config, weights={"allow": [str(root)]}) as served:
        yield served


@pytest.fixture
async def served(root: Path) -> AsyncIterator[Served]:
    async with serving_adapters(root) as one:
        yield one


async def ask(served: Served, method: str, path: str, sent: object = None) -> tuple[int, Any]:
    async with served.http.request(method, served.url + path, json=sent) as answer:
        content = await answer.read()
        return answer.status, json.loads(content) if content else None


async def put(served: Served, name: str, path: Path, **fields) -> tuple[int, Any]:
    sent = {"path": str(path), **fields}
    return await ask(served, "PUT", paths.ADAPTER.format(name=name), sent)


async def refused(served: Served, name: str, path: object, **fields) -> ServiceError:
    sent = {"path": str(path), **fields}
    status, content = await ask(served, "PUT", paths.ADAPTER.format(name=name), sent)
    error = error_of(status, json.dumps(content).encode(), name)
    assert status == error.http_status
    return error


async def listed(served: Served) -> dict[str, int]:
    status, content = await ask(served, "GET", paths.ADAPTERS)
    assert status == 200
    return {each["name"]: each["version"] for each in content["adapters"]}


async def generate(served: Served, **fields) -> LLMResponse:
    sent = body("r", input_ids=PROMPT, gconfig=GREEDY, **fields)
    status, content = await served.post(paths.GENERATE, sent)
    assert status == 200, content
    return LLMResponse.model_validate_json(content)


# Our own routes.


async def test_an_adapter_is_put_used_listed_and_deleted(served: Served, root: Path):
    assert await listed(served) == {}
    plain = await generate(served)
    assert await put(served, "a", root / "a") == (200, {"name": "a", "version": 1})
    assert await put(served, "b", root / "b", version=7) == (200, {"name": "b", "version": 7})
    assert await listed(served) == {"a": 1, "b": 7}
    a, b = [await generate(served, adapter=name) for name in "ab"]
    assert (a.version_runs, b.version_runs) == ([(1, 0, 6)], [(7, 0, 6)])
    assert plain.version_runs == [(0, 0, 6)]
    assert (await generate(served, adapter=None)).output_tokens == plain.output_tokens
    assert len({tuple(r.output_logprobs) for r in (plain, a, b)}) == 3
    assert await ask(served, "DELETE", paths.ADAPTER.format(name="a")) == (204, None)
    assert await listed(served) == {"b": 7}
    error = await served.refused(paths.GENERATE, body("r", adapter="a"))
    assert (error.code, error.message) == ("data", "the adapter 'a' is not loaded; loaded: b")


async def test_versions_go_forward(served: Served, root: Path):
    assert (await put(served, "a", root / "a"))[1]["version"] == 1
    assert (await put(served, "a", root / "b", version=None))[1]["version"] == 2
    assert (await put(served, "a", root / "b", version=5))[1]["version"] == 5
    assert (await put(served, "a", root / "a", version=5))[1]["version"] == 5
    late = await refused(served, "a", root / "b", version=4)
    assert (late.code, late.message) == ("stale_version", "version 4 of a is older than 5")
    assert await listed(served) == {"a": 5}
    pinned = await generate(served, adapter="a", version=5)
    assert pinned.version_runs == [(5, 0, 6)]
    moved = await served.refused(paths.GENERATE, body("r", adapter="a", version=0))
    assert (moved.code, moved.http_status) == ("version_moved", 409)


async def test_what_cannot_be_served_is_refused_and_changes_nothing(
    served: Served, root: Path, tmp_path: Path
):
    await put(served, "a", root / "a")
    broken = shutil.copytree(root / "a", root / "broken", dirs_exist_ok=True)
    (broken / WEIGHTS_NAME).write_bytes(b"")
    for path, message in (
        (tmp_path, "add it to weights.allow"),
        (root / "nowhere", "no adapter can be read"),
        (broken, "no adapter can be read"),
        (root / "a" / ".." / ".." / "x", "weights.allow"),
        ("http://127.0.0.1:9/a", "weights.allow"),
    ):
        error = await refused(served, "new", path)
        assert (error.code, message in error.message) == ("sync", True), error.message
    assert await listed(served) == {"a": 1}
    await put(served, "b", root / "b")
    full = await refused(served, "c", root / "a")
    assert (full.code, "backend.max_adapters=2" in full.message) == ("conflict", True)
    assert await listed(served) == {"a": 1, "b": 1}
    status, content = await ask(served, "DELETE", paths.ADAPTER.format(name="c"))
    assert (status, content["code"]) == (400, "data")
    assert content["message"] == "the adapter 'c' is not loaded; loaded: a, b"


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("a%20b", {"path": "/x"}),
        ("x" * 129, {"path": "/x"}),
        ("a", {}),
        ("a", {"path": ""}),
        ("a", {"path": "/x", "version": -1}),
        ("a", {"path": "/x", "rank": 8}),
    ],
)
async def test_a_malformed_request_is_a_422(served: Served, name: str, sent: object):
    status, content = await ask(served, "PUT", paths.ADAPTER.format(name=name), sent)
    assert (status, content["code"]) == (422, "invalid_request")


async def test_a_backend_without_adapters_refuses_them(tmp_path: Path):
    async with serving(weights={"allow": [str(tmp_path)]}) as served:
        assert await listed(served) == {}
        for error in (
            await refused(served, "a", tmp_path),
            await served.refused(paths.GENERATE, body("r", adapter="a")),
        ):
            assert error.code == "data"
            assert "serves no adapters beside its base" in error.message
        assert (await ask(served, "DELETE", paths.ADAPTER.format(name="a")))[0] == 400
        assert (await served.post(paths.GENERATE, body("r", adapter=None)))[0] == 200


async def test_a_deleted_adapter_answers_what_runs_with_the_tokens_so_far(
    served: Served, root: Path
):
    await put(served, "a", root / "a")
    options = {"max_new_tokens": LONG, "ignore_eos": True}
    sent = body("r", input_ids=PROMPT, gconfig=options, adapter="a")
    await served.post(paths.GENERATION_PAUSE, {"mode": "in_place"})
    running = asyncio.create_task(served.post(paths.GENERATE, sent))
    await served.until(lambda: served.generator.backend.load().queued)
    assert (await ask(served, "DELETE", paths.ADAPTER.format(name="a")))[0] == 204
    response = LLMResponse.model_validate_json((await running)[1])
    assert (response.stop_reason, response.output_tokens) == ("interrupt", [])
    await served.post(paths.GENERATION_RESUME, {})


# SGLang's routes.


async def test_sglang_s_clients_load_use_and_unload(served: Served, root: Path):
    load = {"lora_name": "a", "lora_path": str(root / "a")}
    status, content = await ask(served, "POST", paths.SGLANG_LORA_LOAD, load)
    assert (status, content["success"], content["loaded_adapters"]) == (200, True, {"a": "a"})
    load = {"lora_name": "b", "lora_path": str(root / "b"), "pinned": True}
    content = (await ask(served, "POST", paths.SGLANG_LORA_LOAD, load))[1]
    assert content["loaded_adapters"] == {"a": "a", "b": "b"}
    sent = {
        "input_ids": [PROMPT] * 3,
        "sampling_params": GREEDY,
        "lora_path": ["a", None, "b"],
    }
    status, answers = await ask(served, "POST", paths.SGLANG_GENERATE, sent)
    assert status == 200, answers
    wanted = [await generate(served, adapter=name) for name in ("a", None, "b")]
    assert [each["output_ids"] for each in answers] == [each.output_tokens for each in wanted]
    labels = [each["meta_info"]["weight_version"] for each in answers]
    assert labels == ["1", "default", "1"]
    for given, expected in (("a", wanted[0]), (None, wanted[1])):
        one = {"input_ids": PROMPT, "sampling_params": GREEDY, "lora_path": given}
        content = (await ask(served, "POST", paths.SGLANG_GENERATE, one))[1]
        assert content["output_ids"] == expected.output_tokens
    gone = {"lora_name": "a"}
    content = (await ask(served, "POST", paths.SGLANG_LORA_UNLOAD, gone))[1]
    assert content["loaded_adapters"] == {"b": "b"}


async def test_a_label_of_the_base_is_not_an_adapter_s(served: Served, root: Path):
    relabel = {"new_version": "step-0"}
    await ask(served, "POST", paths.SGLANG_RELABEL, relabel)
    await put(served, "a", root / "a", version=0)
    for adapter, label in (("a", "0"), (None, "step-0")):
        sent = {"input_ids": PROMPT, "sampling_params": GREEDY, "lora_path": adapter}
        content = (await ask(served, "POST", paths.SGLANG_GENERATE, sent))[1]
        told = content["meta_info"]
        assert told["weight_version"] == label
        assert [span["version"] for span in told["weight_versions"]] == [label]


async def test_sglang_s_failures_are_a_400_that_says_why(
    served: Served, root: Path, tmp_path: Path
):
    async def failed(path: str, sent: object) -> Any:
        status, content = await ask(served, "POST", path, sent)
        assert status == 400, content
        return content

    await put(served, "b", root / "b")
    gone = "the adapter 'a' is not loaded; loaded: b"
    elsewhere = {"lora_name": "a", "lora_path": str(tmp_path)}
    change = await failed(paths.SGLANG_LORA_LOAD, elsewhere)
    assert (change["success"], change["loaded_adapters"]) == (False, {"b": "b"})
    assert "weights.allow" in change["error_message"]
    change = await failed(paths.SGLANG_LORA_UNLOAD, {"lora_name": "a"})
    assert change == {"success": False, "error_message": gone, "loaded_adapters": {"b": "b"}}
    one = {"input_ids": PROMPT, "sampling_params": GREEDY}
    for path, sent, message in (
        (paths.SGLANG_LORA_LOAD, {"lora_name": "a b", "lora_path": "/x"}, "lora_name"),
        (paths.SGLANG_LORA_LOAD, {"lora_name": "a", "lora_path": "/x\0"}, "lora_path"),
        (paths.SGLANG_LORA_LOAD, {"lora_name": "a"}, "lora_path"),
        (paths.SGLANG_GENERATE, {**one, "lora_path": "a"}, gone),
        (paths.SGLANG_GENERATE, {**one, "lora_path": ["a", "b"]}, "2 values for 1 prompts"),
        (paths.SGLANG_GENERATE, {**one, "lora_path": "a b"}, "lora_path"),
    ):
        assert message in (await failed(path, sent))["error"]["message"]


# OpenAI's names.


async def complete(served: Served, model: str) -> tuple[int, Any]:
    sent = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return await ask(served, "POST", paths.COMPLETIONS, sent)


async def test_openai_s_clients_name_an_adapter_as_the_model(served: Served, root: Path):
    await put(served, "a", root / "a", version=3)
    await put(served, "b", root / "b")
    for model, adapter, version in (
        ("a", "a", 3),
        ("base:a", "a", 3),
        (f"{root / 'base'}:b", "b", 1),
        ("b", "b", 1),
        ("base", None, 0),
        ("default", None, 0),
        (str(root / "base"), None, 0),
    ):
        wanted = await generate(served, adapter=adapter)
        status, content = await complete(served, model)
        assert status == 200, content
        assert content["choices"][0]["token_ids"] == wanted.output_tokens, model
        assert content["metadata"] == {"weight_version": str(version)}
    status, content = await complete(served, "base:nobody")
    assert (status, content["error"]["code"]) == (404, "not_found")
    message = "model 'base:nobody' is not served here; 'base', 'a', 'b' are"
    assert content["error"]["message"] == message


async def test_adapters_are_models_of_the_list(served: Served, root: Path):
    await put(served, "a", root / "a")
    content = (await ask(served, "GET", paths.MODELS))[1]
    assert [(card["id"], card.get("parent")) for card in content["data"]] == [
        ("base", None),
        ("a", "base"),
    ]
    for name in ("a", "base:a"):
        status, card = await ask(served, "GET", paths.MODEL.format(model=name))
        assert (status, card["id"], card["parent"]) == (200, "a", "base")
    await ask(served, "DELETE", paths.ADAPTER.format(name="a"))
    assert (await ask(served, "GET", paths.MODEL.format(model="a")))[0] == 404
    assert (await complete(served, "a"))[0] == 404
