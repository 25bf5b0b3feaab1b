"""Fields that bind an answer to a JSON schema or a regular expression, as several APIs have them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from headway.dialects.unsupported import RequestPart, unsupported

ANY_OBJECT: dict[str, JsonValue] = {"type": "object"}
ONE_OF_TWO = "send a JSON schema or a regular expression"


def _parsed(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except RecursionError as error:
        raise ValueError("nested too deep") from error


JsonSchema = Annotated[dict[str, JsonValue], BeforeValidator(_parsed)]
"""A JSON schema, also as text."""


class JsonSchemaFormat(RequestPart):
    """`json_schema` of OpenAI's chats; the format itself elsewhere."""

    name: str | None = None
    """Not used."""
    description: str | None = None
    """Not used: say it in the messages."""
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None
    """Not used: a schema always binds."""


class TextFormat(JsonSchemaFormat):
    """`text.format` of OpenAI's responses, `output_config.format` of Anthropic's messages."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type json_schema without a schema")
        if self.type != "json_schema" and self.schema_ is not None:
            raise ValueError(f"a schema with type {self.type}; send type json_schema")
        return self

    @property
    def bound(self) -> dict[str, JsonValue] | None:
        """The schema; None for text."""
        return {"text": None, "json_object": ANY_OBJECT, "json_schema": self.schema_}[self.type]


class ResponseFormat(RequestPart):
    """`response_format` of OpenAI's chats."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        has_schema = self.json_schema is not None and self.json_schema.schema_ is not None
        if self.type == "json_schema" and not has_schema:
            raise ValueError("type json_schema without json_schema.schema")
        if self.type != "json_schema" and has_schema:
            raise ValueError(f"a schema with type {self.type}; send type json_schema")
        return self

    @property
    def bound(self) -> dict[str, JsonValue] | None:
        """The schema; None for text."""
        if self.type == "json_schema":
            return None if self.json_schema is None else self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(RequestPart):
    """`structured_outputs` of vLLM."""

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[JsonValue, unsupported(ONE_OF_TWO)] = None
    grammar: Annotated[JsonValue, unsupported(ONE_OF_TWO)] = None
    json_object: Annotated[JsonValue, unsupported("send response_format", False)] = None
    structural_tag: Annotated[JsonValue, unsupported(ONE_OF_TWO)] = None
    disable_any_whitespace: Annotated[JsonValue, unsupported(ONE_OF_TWO, False)] = None
    disable_additional_properties: Annotated[
        JsonValue, unsupported("say so in the schema", False)
    ] = None
    whitespace_pattern: Annotated[JsonValue, unsupported(ONE_OF_TWO)] = None
