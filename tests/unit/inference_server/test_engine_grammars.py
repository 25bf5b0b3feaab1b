"""`json_schema` and `regex` on their way into SGLang and vLLM."""

from __future__ import annotations

import json
import math

import pytest

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import DataError
from headway.contracts.types import LLMRequest
from inference_server.backends.sglang import wire as sglang_wire
from inference_server.backends.sglang.wire import EngineOutput
from inference_server.backends.vllm import wire as vllm_wire
from tests.unit.inference_server.sglang_stand_in import StandIn
from tests.unit.inference_server.test_sglang_backend import (
    attached,
    begin,
    model_dir,  # noqa: F401 - a fixture
)
from tests.unit.inference_server.test_vllm_backend import serving
from tests.unit.inference_server.vllm_stand_in import shape

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REGEX = "(yes|no) [0-9]{2}"
KINDS = [({"json_schema": SCHEMA}, "json_schema"), ({"regex": REGEX}, "regex")]


def bound(**grammar) -> LLMRequest:
    gconfig = SamplingConfig(max_new_tokens=6, **grammar)
    return LLMRequest(rid="r", input_ids=(3, 4, 5), gconfig=gconfig)


# SGLang.


def test_sglang_reads_a_schema_as_text_and_an_expression_as_it_is():
    params = sglang_wire.sampling_params(bound(json_schema=SCHEMA).gconfig)
    assert json.loads(params["json_schema"]) == SCHEMA
    assert "regex" not in params
    params = sglang_wire.sampling_params(bound(regex=REGEX).gconfig)
    assert params["regex"] == REGEX
    assert "json_schema" not in params
    free = sglang_wire.sampling_params(bound().gconfig)
    assert not {"json_schema", "regex"} & free.keys()


@pytest.mark.parametrize(("grammar", "name"), KINDS)
async def test_sglang_gets_the_grammar_of_a_request(model_dir, grammar, name):  # noqa: F811
    engine = StandIn()
    async with attached(model_dir, engine) as backend:
        [task] = await begin(backend, engine, bound(**grammar))
        sent = engine.running[0].body["sampling_params"][name]
        engine.step(7)
        await task
    assert (json.loads(sent) if name == "json_schema" else sent) == grammar[name]


@pytest.mark.parametrize(("grammar", "name"), KINDS)
async def test_an_sglang_without_a_tokenizer_refuses_grammars_alone(
    model_dir,  # noqa: F811 - the fixture
    grammar,
    name,
):
    engine = StandIn()
    engine.info["skip_tokenizer_init"] = True
    async with attached(model_dir, engine) as backend:
        with pytest.raises(DataError, match="json_schema and regex need a tokenizer"):
            await backend.generate(bound(**grammar))
        assert engine.asked("/generate") == []
        [task] = await begin(backend, engine, bound())
        engine.step(7)
        assert (await task).stop_reason == "length"


def test_what_a_grammar_forbids_is_no_alternative_in_sglang():
    rows = [[[-0.5, 7, None], [None, 8, None], [-math.inf, 9, None]], [[-1.0, 3, None]]]
    output = EngineOutput([7, 3], {"output_top_logprobs": rows})
    assert sglang_wire.top_logprobs_of(output, 2) == [[(7, -0.5)], [(3, -1.0)]]


# vLLM.


def test_vllm_reads_both_as_structured_outputs():
    def found(**grammar):
        return vllm_wire.sampling_params(bound(**grammar)).get("structured_outputs")

    assert found(json_schema=SCHEMA) == {"json": SCHEMA}
    assert found(regex=REGEX) == {"regex": REGEX}
    assert found(json_schema={}) == {"json": {}}  # any JSON is still JSON
    assert found() is None


@pytest.mark.parametrize(("grammar", "name"), KINDS)
async def test_vllm_gets_the_grammar_of_a_request(llama_dir, grammar, name):
    async with serving(llama_dir) as (backend, engine):
        await backend.generate(bound(**grammar))
        sent = engine.calls[-1][1]["sampling_params"]["structured_outputs"]
    assert sent == {name.removesuffix("_schema"): grammar[name]}


def test_what_a_grammar_forbids_is_no_alternative_in_vllm():
    answer = shape("generate")
    choice = answer["choices"][0]
    choice["weight_versions"][0]["version"] = "4"
    [entry] = choice["logprobs"]["content"]
    entry["top_logprobs"] += [
        {"token_id": 7, "logprob": vllm_wire.NOT_FINITE, "rank": 2},
        {"token_id": 8, "logprob": -9.0, "rank": 3},
    ]
    part = vllm_wire.read_chunk(answer, 3)
    assert part.top == [[(416, -5.7694), (8, -9.0)]]
