"""Text <-> token ids without torch: `tokenizer.json` and the model's own chat template."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headway.contracts.errors import ConfigError, DataError, RequestTooLong
from headway.contracts.types import Prompt
from headway.runtime.model_files import check_text, read_object, read_text
from headway.runtime.offload import SMALL, size_of
from headway.text.chat_template import ChatTemplate
from headway.text.vocabulary import Vocabulary, tokenizer_digest

MAX_PROMPT_BYTES = 1 << 20
NFC_SHRINKS = 3
"""A text in this form has at least so small a share of the bytes that it had."""
STAND_IN = "STANDIN"
"""Written where a sampled message stands, to see what a template puts behind it."""


class TextTokenizer:
    """The tokenizer of a model directory.

    Everything here takes time linear in what it is given; call it through `offload` for what comes from
    outside. A long text lets go of the interpreter's lock.
    """

    def __init__(self, directory: str, max_bytes: int = MAX_PROMPT_BYTES) -> None:
        """
        Args:
            max_bytes: of a text that is encoded, in UTF-8.
        """
        folder = self._folder = Path(directory)
        self._max_bytes = max_bytes
        file = folder / "tokenizer.json"
        if not os.access(file, os.R_OK):
            raise ConfigError(
                f"{file} does not exist, or user {os.geteuid()} may not read it; give the directory of a "
                "model with a fast tokenizer"
            )
        self._tokenizer = _tokenizer_of(file)
        settings = folder / "tokenizer_config.json"
        self._settings = _object(settings)
        self.model_vocab_size = _vocab_size(_object(folder / "config.json"))
        """Vocabulary size in its `config.json`; None if there is none, or it does not say."""
        template = folder / "chat_template.jinja"
        source = self._settings.get("chat_template")
        self._chat_source = (
            read_text(template) if template.exists() else _template_of(source, settings)
        )

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
        self.check_length(text)
        try:
            if len(text) <= SMALL:
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
            # Of a batch, unlike of one text, it lets go of the interpreter's lock.
            (found,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(found.ids)
        except (TypeError, UnicodeError) as error:  # how a str without UTF-8 form is refused
            raise DataError(
                "the text holds half of a surrogate pair; send valid Unicode"
            ) from error

    def least_tokens(self, text: str) -> int:
        """Return the minimum number of tokens of a text by its length; 0 where that gives no bound."""
        if not self._bytes_per_token or not text:
            return 0
        return max(1, len(text.encode(errors="replace")) // self._bytes_per_token)

    @cached_property
    def vocab_size(self) -> int:
        """Token ids below it may be the model's: its `config.json` counts more than the tokenizer."""
        return max(self._num_tokens, self.model_vocab_size or 0)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What a server's model must agree with."""
        digest = tokenizer_digest(self._tokenizer)
        return Vocabulary(self._num_tokens, self.model_vocab_size, digest)

    @cached_property
    def _num_tokens(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def _bytes_per_token(self) -> int:
        """Bytes of a text that one token stands for, at most; 0 where tokens do not spell all of it."""
        tokenizer = self._tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        normalizers = _parts(tokenizer.normalizer, "normalizers")
        splitters = _parts(tokenizer.pre_tokenizer, "pretokenizers")
        is_spelled = (
            self._byte_of is not None
            and tokenizer.truncation is None
            and not any(token.lstrip or token.rstrip for token in added)
            and all(part["type"] == "NFC" for part in normalizers)
            and all(part["type"] in _KEEPING for part in splitters)
            and all(part.get("behavior") != "Removed" for part in splitters)
        )
        longest = max((len(name.encode()) for name in tokenizer.get_vocab()), default=0)
        return longest * (NFC_SHRINKS if normalizers else 1) if is_spelled else 0

    def check_length(self, *texts: str) -> None:
        """Refuse what is too long to be encoded.

        Raises:
            RequestTooLong: the texts have more than `max_bytes` together.
        """
        if 4 * sum(map(len, texts)) <= self._max_bytes:
            return
        length = sum(len(text.encode(errors="replace")) for text in texts)
        if length > self._max_bytes:
            raise RequestTooLong(
                f"a text of {length} bytes is longer than executor.max_prompt_bytes={self._max_bytes}; "
                "shorten it, or raise the setting"
            )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
        opens: bool = True,
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant begins to write.

        Args:
            messages: role, content and whatever else the template knows.
            tools: functions that the model may call, each as JSON schema.
            template_args: further variables of the template (`enable_thinking`, ...).
            opens: false ends with the last message, for a model that reads the whole chat.

        Raises:
            DataError: the model has no chat template, or it fails on these messages.
        """
        variables = {**(template_args or {}), **({"tools": list(tools)} if tools else {})}
        text = self._render(messages, variables, opens=opens)
        ids = self.encode(text, add_special_tokens=False)
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
                "tokenizer joins the two; this model cannot be run over several turns"
            )
        return joined[len(alone) :]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        if len(ids) <= SMALL:
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def defuse(self, text: str) -> str:
        """A text from outside that spells no special token: what it says cannot end a message.

        A zero-width space parts what would be one; everything else stays.
        """
        return self._special.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)

    @cached_property
    def special_ids(self) -> list[int]:
        """Ids of the special tokens, ascending: no text spells them."""
        added = self._tokenizer.get_added_tokens_decoder()
        return sorted(number for number, token in added.items() if token.special)

    @cached_property
    def end_ids(self) -> list[int]:
        """Ids that may end a sequence: special tokens, and what the model's files name, ascending."""
        return sorted({*self.special_ids, *_eos_ids(self._folder)})

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = [re.escape(token.content) for token in added if token.special]
        return re.compile("|".join(sorted(names, key=len, reverse=True)) or r"(?!)")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token adds to a text, in UTF-8; a token may hold part of a
        character."""
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
    def _template(self) -> ChatTemplate:
        """Compiling it takes longer than rendering."""
        if self._chat_source is None:
            raise DataError(
                "the model has no chat template; send the prompt as text (data.chat: false)"
            )
        return ChatTemplate(self._chat_source)

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
        if size_of([messages, variables], self._max_bytes) >= self._max_bytes:
            self.check_length(json.dumps([messages, variables], ensure_ascii=False, default=str))
        try:
            return self._template.render(
                {**special, **variables, "messages": messages, "add_generation_prompt": opens}
            )
        except DataError as error:
            raise DataError(
                f"{error.message} ({where.strip()})" if where else error.message
            ) from error
        except Exception as error:  # a template is a program of its own
            raise DataError(f"chat template failed{where}: {error}") from error


def _tokenizer_of(file: Path) -> Tokenizer:
    check_text(file)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{file} holds no tokenizer: {error}") from error


def _template_of(source: Any, file: Path) -> str | None:
    """The template in `tokenizer_config.json`, or of several the one named `default`."""
    if isinstance(source, list):
        named = [one for one in source if isinstance(one, dict) and one.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if source is not None and not isinstance(source, str):
        raise ConfigError(f"the chat template in {file} is a {type(source).__name__}, not a text")
    return source


def _object(file: Path) -> dict[str, Any]:
    return read_object(file) if file.exists() else {}


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    of_text = config.get("text_config")  # where the model has eyes, too
    size = config.get(
        "vocab_size", of_text.get("vocab_size") if isinstance(of_text, dict) else None
    )
    return size if isinstance(size, int) else None


def _eos_ids(folder: Path) -> Iterator[int]:
    """End-of-sequence tokens of a model's directory: one or a list, in either file."""
    for name in ("generation_config.json", "config.json"):
        named = _object(folder / name).get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        yield from (each for each in ids if type(each) is int)


def _behind_stand_in(before: str, whole: str) -> str:
    """Return the text of a rendered chat behind the stand-in, which follows `before`."""
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


_KEEPING = frozenset({"ByteLevel", "Digits", "Split"})
"""Return ways to split a text that keep all of it."""


def _parts(step: Any, key: str) -> list[dict[str, Any]]:
    """The parts of a step of a tokenizer."""
    if step is None:
        return []
    state = json.loads(step.__getstate__())
    return list(state.get(key, [state]))


def _shared_start(first: str, second: str) -> str:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return first[:place]
    return min(first, second, key=len)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character of each byte: itself where it can be printed, else one from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }
