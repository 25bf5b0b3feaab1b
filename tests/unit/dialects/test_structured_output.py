"""Each API's way to ask for a JSON schema or a regular expression, as sampling parameters of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from headway.dialects.anthropic.request import MessagesRequest
from headway.dialects.error_shapes import InvalidField
from headway.dialects.openai.chat_request import ChatRequest
from headway.dialects.openai.completion_request import CompletionRequest
from headway.dialects.openai.responses_request import ResponsesRequest
from headway.dialects.sglang.types import SGLangSampling
from headway.dialects.structured_output import ANY_OBJECT, JsonSchema

SAY = [{"role": "user", "content": "say"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "answer", "description": "an answer", "strict": True, "schema": SCHEMA}
BOTH = ("json_schema", "regex")


def bound_by(request: Any) -> dict[str, Any]:
    given = request.given()
    return {name: given[name] for name in BOTH if given.get(name) is not None}


def chat(**fields: Any) -> ChatRequest:
    request = ChatRequest(model="m", messages=SAY, **fields)
    request.check()
    return request


def completion(**fields: Any) -> CompletionRequest:
    request = CompletionRequest(model="m", prompt="say", **fields)
    request.check()
    return request


def responses(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest(input="say", **fields)


def messages(**fields: Any) -> MessagesRequest:
    return MessagesRequest(model="m", messages=SAY, max_tokens=9, **fields)


TEXT = json.dumps(SCHEMA)
FORMAT = {"type": "json_schema", "schema": SCHEMA}
OBJECT = {"json_schema": ANY_OBJECT}
BY_SCHEMA, BY_REGEX = {"json_schema": SCHEMA}, {"regex": "a+"}
ASKED = [
    (chat, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, BY_SCHEMA),
    (
        chat,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": TEXT}}},
        BY_SCHEMA,
    ),
    (chat, {"response_format": {"type": "json_object"}}, OBJECT),
    (chat, {"response_format": {"type": "text"}}, {}),
    (responses, {"text": {"format": FORMAT}}, BY_SCHEMA),
    (responses, {"text": {"format": {**NAMED, "type": "json_schema"}}}, BY_SCHEMA),
    (responses, {"text": {"format": {"type": "json_object"}}}, OBJECT),
    (responses, {"text": {"format": {"type": "text"}}}, {}),
    (messages, {"output_config": {"format": FORMAT}}, BY_SCHEMA),
    *((kind, {"regex": "a+"}, BY_REGEX) for kind in (chat, completion)),
    *((kind, {"json_schema": SCHEMA}, BY_SCHEMA) for kind in (chat, completion)),
    *((kind, {"json_schema": TEXT}, BY_SCHEMA) for kind in (chat, completion)),
    *((kind, {"json_schema": {}}, {"json_schema": {}}) for kind in (chat, completion)),
    *((kind, {"structured_outputs": {"regex": "a+"}}, BY_REGEX) for kind in (chat, completion)),
    *((kind, {"structured_outputs": {"json": TEXT}}, BY_SCHEMA) for kind in (chat, completion)),
    (chat, {"response_format": {"type": "text"}, "regex": "a+"}, BY_REGEX),
]


@pytest.mark.parametrize(("kind", "fields", "wanted"), ASKED)
def test_what_binds_an_answer_becomes_a_sampling_parameter(kind, fields, wanted):
    assert bound_by(kind(**fields)) == wanted


def test_a_choice_is_sampled_under_what_binds_it():
    for kind in (chat, completion):
        gconfig = kind(json_schema=TEXT, n=2, seed=3).sampling(16, 1)
        assert (gconfig.json_schema, gconfig.regex, gconfig.seed) == (SCHEMA, None, 4)


def test_sglang_has_both_by_our_names():
    assert SGLangSampling(json_schema=TEXT).json_schema == SCHEMA
    assert SGLangSampling(regex="a+").regex == "a+"
    for name in ("ebnf", "structural_tag", "stop_regex"):
        assert getattr(SGLangSampling(**{name: None}), name) is None
        with pytest.raises(ValidationError, match=name):
            SGLangSampling(**{name: "a"})


NOTHING = [
    (chat, {"response_format": None, "regex": None, "json_schema": None, "ebnf": None}),
    (chat, {"response_format": {"type": "text", "json_schema": None}, "structured_outputs": None}),
    (chat, {"structured_outputs": {"json": None, "regex": None, "choice": None, "grammar": None}}),
    (chat, {"structured_outputs": {"json_object": False, "disable_any_whitespace": False}}),
    (completion, {"regex": None, "structured_outputs": {"structural_tag": None}}),
    (responses, {"text": None}),
    (responses, {"text": {"format": None}}),
    (responses, {"text": {"format": {"type": "text", "schema": None, "name": None}}}),
    (messages, {"output_config": None}),
    (messages, {"output_config": {"format": None, "effort": None}}),
]


@pytest.mark.parametrize(("kind", "fields"), NOTHING)
def test_null_is_absent(kind, fields):
    assert bound_by(kind(**fields)) == bound_by(kind()) == {}


def test_null_inside_of_a_schema_is_kept():
    schema = {"enum": [1, None], "default": None}
    assert bound_by(chat(json_schema=schema)) == {"json_schema": schema}
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": None}}
    assert bound_by(chat(response_format=form)) == {"json_schema": schema}


VLLM = "structured_outputs"
REFUSED = [
    *(
        (chat, {VLLM: {name: value}}, f"{VLLM}.{name}", why)
        for name, value, why in [
            ("choice", ["a", "b"], "send a JSON schema or a regular expression"),
            ("grammar", "root ::= x", "send a JSON schema or a regular expression"),
            ("structural_tag", "{}", "send a JSON schema or a regular expression"),
            ("whitespace_pattern", " *", "send a JSON schema or a regular expression"),
            ("disable_any_whitespace", True, "send a JSON schema or a regular expression"),
            ("json_object", True, "send response_format"),
            ("disable_additional_properties", True, "say so in the schema"),
        ]
    ),
    (chat, {VLLM: {"jsn": {}}}, f"{VLLM}.jsn", "Extra inputs"),
    (completion, {"ebnf": "root ::= x"}, "ebnf", "send a JSON schema or a regular expression"),
    (completion, {"json_schema": "{"}, "json_schema", "Expecting property name"),
    (completion, {"json_schema": "[1]"}, "json_schema", "valid dictionary"),
    (completion, {"json_schema": '{"a":' * 100_000}, "json_schema", "nested too deep"),
    (chat, {"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    (chat, {"response_format": {}}, "response_format.type", "Field required"),
    (
        chat,
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "type json_schema without json_schema.schema",
    ),
    (
        chat,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format",
        "type json_schema without json_schema.schema",
    ),
    (
        chat,
        {"response_format": {"type": "json_object", "json_schema": NAMED}},
        "response_format",
        "a schema with type json_object; send type json_schema",
    ),
    (
        responses,
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format",
        "type json_schema without a schema",
    ),
    (
        responses,
        {"text": {"format": {"schema": SCHEMA}}},
        "text.format",
        "a schema with type text; send type json_schema",
    ),
    (
        messages,
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format",
        "type json_schema without a schema",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "place", "why"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(kind, fields, place, why):
    with pytest.raises(ValidationError) as raised:
        kind(**fields)
    [problem] = raised.value.errors()
    assert ".".join(map(str, problem["loc"])).startswith(place)
    assert why in problem["msg"]


BESIDE = [
    ({VLLM: {"regex": "a"}, "regex": "b"}, VLLM),
    ({VLLM: {"regex": "a"}, "json_schema": {}}, VLLM),
    ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    ({"response_format": {"type": "json_object"}, VLLM: {"json": SCHEMA}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "name"), BESIDE)
def test_two_that_bind_one_answer_are_refused(fields, name):
    with pytest.raises(InvalidField, match=f"{name} beside .*send one of them") as raised:
        chat(**fields)
    assert raised.value.param == name


def test_a_schema_beside_an_expression_is_refused_where_a_choice_is_sampled():
    for fields in ({"json_schema": SCHEMA, "regex": "a"}, {VLLM: {"json": SCHEMA, "regex": "a"}}):
        with pytest.raises(InvalidField, match="json_schema and regex both bind the output"):
            chat(**fields).sampling(16, 0)


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_a_schema_as_text_that_is_nested_too_deep_is_refused(depth):
    text = '{"allOf":[' * depth + "{}" + "]}" * depth
    with pytest.raises(ValidationError):
        TypeAdapter(JsonSchema).validate_python(text)
