"""Text <-> token ids without torch: `tokenizer.json` and the model's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import Prompt

STAND_IN = "STANDIN"
"""Written where a sampled message stands, to see what a template puts behind it."""


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
            ids = self.encode(prompt.text)
        else:
            messages = [message.model_dump() for message in prompt.messages or ()]
            ids = self.encode(self._render(messages, {}, f" on group {prompt.group_id!r}"), False)
        if not ids:
            raise DataError(f"prompt of group {prompt.group_id!r} has no tokens")
        return ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            DataError: it holds half of a surrogate pair, which is no character.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # how a str without UTF-8 form is refused
            raise DataError(
                "the text holds half of a surrogate pair; send valid Unicode"
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant begins to write.

        Args:
            messages: role, content and whatever else the template knows.
            tools: functions that the model may call, each as JSON schema.
            template_args: further variables of the template (`enable_thinking`, ...).

        Raises:
            DataError: the model has no chat template, or it fails on these messages.
        """
        variables = {**(template_args or {}), **({"tools": list(tools)} if tools else {})}
        ids = self.encode(self._render(messages, variables), add_special_tokens=False)
        if not ids:
            raise DataError("the chat template made no tokens of these messages")
        return ids

    def encode_bridge(
        self,
        sampled: Sequence[int],
        history: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids between a sampled assistant message and where the assistant writes again.

        The sampled tokens stay as they are: the template is rendered with a stand-in for them, and what
        follows the stand-in is encoded. What they closed themselves (`<|im_end|>`) is not closed twice.
        Thinking stays in the row where a template would drop it from the history: it is what the policy
        saw.

        Args:
            sampled: tokens of the assistant's message.
            history: messages in front of it; earlier sampled ones may be stand-ins too.
            messages: what follows it, at least one.
            tools: as in `encode_chat`, and as in the prompt.
            template_args: likewise.

        Raises:
            DataError: the template rewrites earlier messages, or does not write what the assistant said
                as it is.
        """
        variables = {**(template_args or {}), **({"tools": list(tools)} if tools else {})}
        said = [*history, {"role": "assistant", "content": STAND_IN}]
        before = self._render(history, variables, opens=False)
        closing = _behind_stand_in(before, self._render(said, variables, opens=False))
        bridge = _behind_stand_in(before, self._render([*said, *messages], variables))
        ids = self._encode_behind_stand_in(bridge)
        num_closing = len(self._encode_behind_stand_in(_shared_start(closing, bridge)))
        for length in range(min(num_closing, len(sampled)), 0, -1):
            if list(sampled[-length:]) == ids[:length]:
                return ids[length:]
        return ids

    def _encode_behind_stand_in(self, text: str) -> list[int]:
        """Token ids of a text inside another: some tokenizers put a blank in front of a whole one."""
        alone = self.encode(STAND_IN, add_special_tokens=False)
        joined = self.encode(STAND_IN + text, add_special_tokens=False)
        if joined[: len(alone)] != alone:
            raise DataError(
                f"the chat template writes {text[:40]!r} behind an assistant's message, and the "
                "tokenizer joins the two; this model cannot be played over several turns"
            )
        return joined[len(alone) :]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def defuse(self, text: str) -> str:
        """A text from outside that spells no special token: what it says cannot end a message.

        A zero-width space parts what would be one; everything else stays.
        """
        return self._special.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = [re.escape(token.content) for token in added if token.special]
        return re.compile("|".join(sorted(names, key=len, reverse=True)) or r"(?!)")

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8; a token may hold part of a character."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._byte_of is not None and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", name):  # byte fallback
            return bytes.fromhex(name[3:5])
        # Behind itself: some tokenizers drop the blank in front of the first token.
        once = self.decode([token], skip_special_tokens=False)
        return self.decode([token, token], skip_special_tokens=False)[len(once) :].encode()

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """The byte that each character of the vocabulary stands for, if they stand for bytes."""
        decoder = self._tokenizer.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        parts = state.get("decoders", [state])
        return _byte_alphabet() if any(p.get("type") == "ByteLevel" for p in parts) else None

    @cached_property
    def _template(self) -> Template:
        """The chat template; compiling it takes longer than rendering."""
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
        return environment.from_string(self._chat_source)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        where: str = "",
        opens: bool = True,
    ) -> str:
        """A chat as text; it `opens` the assistant's next message."""
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and value is not None
        }
        try:
            return self._template.render(
                **{**special, **variables, "messages": messages, "add_generation_prompt": opens}
            )
        except DataError:
            raise
        except Exception as error:  # a template is a program of its own
            raise DataError(f"chat template failed{where}: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote; for a prompt its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _behind_stand_in(before: str, whole: str) -> str:
    """What a rendered chat says behind the stand-in, which follows `before`."""
    if not whole.startswith(before):
        seam = len(_shared_start(before, whole))
        raise DataError(
            "the chat template rewrites earlier messages when others follow: "
            f"{before[seam : seam + 80]!r} became {whole[seam : seam + 80]!r}; turns of one rollout need "
            "a template that only appends"
        )
    _, stand_in, behind = whole[len(before) :].partition(STAND_IN)
    if not stand_in:
        raise DataError(
            "the chat template does not write an assistant's content as it is: "
            f"{STAND_IN!r} is missing from {whole[len(before) :][:200]!r}"
        )
    return behind


def _shared_start(first: str, second: str) -> str:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return first[:place]
    return min(first, second, key=len)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character of each byte: itself where it can be printed, else one from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }
