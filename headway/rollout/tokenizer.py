"""Text <-> token ids without torch: `tokenizer.json` and the model's own chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import Prompt


class TextTokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, directory: str) -> None:
        folder = Path(directory)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist; give the directory of a model with a fast tokenizer"
            )
        self._tokenizer = Tokenizer.from_file(str(file))
        settings = folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = (
            json.loads(settings.read_text()) if settings.is_file() else {}
        )
        template = folder / "chat_template.jinja"
        source = template.read_text() if template.is_file() else self._settings.get("chat_template")
        if isinstance(source, list):  # several templates by name
            source = {named["name"]: named["template"] for named in source}.get("default")
        self._chat_source: str | None = source

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            DataError: the prompt is empty, or a chat for a model without a chat template.
        """
        if prompt.input_ids is not None:
            ids = list(prompt.input_ids)
        elif prompt.text is not None:
            ids = self._tokenizer.encode(prompt.text).ids
        else:
            ids = self._tokenizer.encode(self._render(prompt), add_special_tokens=False).ids
        if not ids:
            raise DataError(f"prompt of group {prompt.group_id!r} has no tokens")
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _render(self, prompt: Prompt) -> str:
        if self._chat_source is None:
            raise DataError(
                "the model has no chat template; send the prompt as text (data.chat: false)"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and value is not None
        }
        messages = [message.model_dump() for message in prompt.messages or ()]
        try:
            return environment.from_string(self._chat_source).render(
                messages=messages, add_generation_prompt=True, **special
            )
        except Exception as error:  # a template is a program of its own
            raise DataError(
                f"chat template failed on group {prompt.group_id!r}: {error}"
            ) from error


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote; for a prompt its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)
