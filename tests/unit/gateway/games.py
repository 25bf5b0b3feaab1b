"""What tests of workflows play with: a policy that follows a script, and judges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.rewards.base import Answer
from headway.contracts.errors import RequestTooLong
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    Message,
    PolicyVersion,
    Prompt,
    RewardResult,
    StopReason,
    Trajectory,
)
from headway.text.tokenizer import TextTokenizer

NOTHING = SharedServices(NoSandbox(), NoOutbound())


@dataclass
class Reply:
    """What one request samples; its last token is of `version` + 1 if `is_swapped`."""

    tokens: Sequence[int]
    version: PolicyVersion = 0
    is_swapped: bool = False
    stop_reason: StopReason = "stop"


@dataclass
class ScriptedPolicy:
    """`Stage.generate`: one reply after the other, cut where `max_new_tokens` says.

    The logprob of a token is minus its id over 1000, so a column that is shifted shows.
    """

    replies: Sequence[Reply]
    max_context: int | None = None
    requests: list[LLMRequest] = field(default_factory=list)

    async def __call__(self, req: LLMRequest) -> LLMResponse:
        if self.max_context and len(req.input_ids) + req.gconfig.max_new_tokens > self.max_context:
            raise RequestTooLong(f"more than {self.max_context} tokens")
        reply = self.replies[len(self.requests)]
        self.requests.append(LLMRequest.model_validate(req.model_dump()))
        limit = req.gconfig.max_new_tokens
        tokens = list(reply.tokens[:limit])
        last = len(tokens) - 1
        runs = [(reply.version, 0, len(tokens))]
        if reply.is_swapped:
            runs = [(reply.version, 0, last), (reply.version + 1, last, last + 1)]
        return LLMResponse(
            rid=req.rid,
            output_tokens=tokens,
            output_logprobs=[logprob_of(token) for token in tokens],
            version_runs=runs,
            stop_reason="length" if len(reply.tokens) > limit else reply.stop_reason,
            stop_match=END if tokens[-1:] == [END] else None,
            latency_s=0.0,
            ttft_s=0.0,
        )


def logprob_of(token: int) -> float:
    return -token / 1000


@dataclass
class Judge:
    """`Stage.score`: the result that a function gives for an answer's text."""

    decide: Callable[[str], RewardResult]
    answers: list[Answer] = field(default_factory=list)

    async def __call__(self, answer: Answer) -> RewardResult:
        self.answers.append(answer)
        return self.decide(answer.completion)


CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


ALPHABET = sorted(ByteLevel.alphabet())
"""The character that stands for each byte, in the order of token ids."""
START, END = len(ALPHABET), len(ALPHABET) + 1


_split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
BYTE_IDS = [ALPHABET.index(_split(chr(byte))[0][0]) for byte in range(128)]
"""The token of each ASCII character."""


def byte_tokenizer(folder: Path, template: str | None = CHATML) -> TextTokenizer:
    """One token per byte, besides ChatML's special tokens."""
    tokenizer = Tokenizer(BPE({name: place for place, name in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<|im_start|>", "<|im_end|>")])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return TextTokenizer(str(folder))


def said(text: str, version: PolicyVersion = 0, **fields) -> Reply:
    """A reply of bytes, each of them one token of `byte_tokenizer`; `<|im_end|>` is one too."""
    return Reply(ids_of(text), version, **fields)


def ids_of(text: str) -> list[int]:
    """What `byte_tokenizer` makes of a text."""
    ids: list[int] = []
    for place, stretch in enumerate(text.split("<|im_end|>")):
        ids += [END] * bool(place)
        for number, inner in enumerate(stretch.split("<|im_start|>")):
            ids += [START] * bool(number) + [BYTE_IDS[byte] for byte in inner.encode()]
    return ids


def chat_prompt(*contents: str, **fields) -> Prompt:
    """A chat of user messages."""
    messages = tuple(Message(role="user", content=content) for content in contents)
    return Prompt(**{"group_id": "g7", "group_size": 4, "messages": messages, **fields})


def check_row(row: Trajectory, *stretches: str | Reply) -> None:
    """A row is exactly these stretches: text that was shown, and replies as they were sampled."""
    ids: list[int] = []
    versions: list[int] = []
    spans = []
    for stretch in stretches:
        if isinstance(stretch, str):
            ids += ids_of(stretch)
            versions += [-1] * (len(ids) - len(versions))
        else:
            start, length = len(ids), len(stretch.tokens)
            ids += stretch.tokens
            versions += [stretch.version] * length
            versions[-1] += stretch.is_swapped
            spans.append((start, start + length))
    mask = [version >= 0 for version in versions]
    logprobs = [logprob_of(i) if sampled else 0.0 for i, sampled in zip(ids, mask, strict=True)]
    np.testing.assert_array_equal(row.input_ids, np.array(ids, np.int32))
    np.testing.assert_array_equal(row.loss_mask, mask)
    np.testing.assert_array_equal(row.versions, np.array(versions, np.int32))
    np.testing.assert_array_equal(row.logprobs, np.array(logprobs, np.float32))
    if row.turns:
        assert [(turn.start, turn.end) for turn in row.turns] == spans
