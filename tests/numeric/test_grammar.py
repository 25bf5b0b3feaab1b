"""Output bound to a JSON schema or a regular expression, against languages by their definition, full
float64 forwards and an independent validator."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import jsonschema
import pytest
import torch
from llguidance import LLParserLimits
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import DynamicCache

from gateway.fleet.resume import rest_of
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError, DataError
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.embedded import grammar
from tests.numeric.backends import (
    Call,
    errors,
    generate_all,
    prompt_of,
    request,
    serving,
    stage,
)
from tests.numeric.models import (
    EOS,
    VOCAB_SIZE,
    extend_cache,
    load_reference,
    reference_logits,
    save_model,
)
from tests.numeric.paged import PagedCpu
from tests.unit.inference_server.test_sampler import slow_logits, slow_logprobs

EURO = "€".encode()
TEXTS = [
    *(character.encode() for character in '{}[]":,-.0123456789abcdeflnrstuxABC'),
    *(bytes([byte]) for byte in EURO),
    *(b'{"', b'":', b'",', b'"a"', b'"b":', b"true", b"null", b"fal", b"e,", b"],", b"}]"),
    *(b"AB", b"BA", b"ABA", b"-A", b"12", b"00"),
]
"""Text of the tokens from 2 on: characters, bytes of one, and several characters. None is white space."""
SPARE = range(2 + len(TEXTS), VOCAB_SIZE)
"""Tokens of the model that the tokenizer does not know."""


def alphabet_of(text):
    """Bytes in GPT-2's alphabet."""
    return "".join(chr(b) if chr(b).isprintable() else chr(b + 162) for b in text)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two versions of one model, with a tokenizer of `TEXTS`."""
    made = []
    for seed in (0, 1):
        folder = save_model(tmp_path_factory.mktemp(f"model{seed}"), "llama", seed=seed)
        names = ["<s>", "</s>", *map(alphabet_of, TEXTS)]
        special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer = {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": names[number], "special": True, **special}
                for number in (0, EOS)
            ],
            "normalizer": None,
            "pre_tokenizer": None,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "WordLevel",
                "vocab": {name: number for number, name in enumerate(names)},
                "unk_token": "<s>",
            },
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        made.append(folder)
    known = TextTokenizer(str(made[0]))
    assert [known.token_bytes(2 + at) for at in range(len(TEXTS))] == TEXTS
    assert len(SPARE) > 2
    return made


def bound(name, prompt, *, top_logprobs=0, **gconfig):
    """A request that ends where its grammar does."""
    options = {"ignore_eos": False, "max_new_tokens": 200} | gconfig
    return request(name, prompt, top_logprobs=top_logprobs, **options)


def text_of(response):
    """Bytes of an output, without its end."""
    ids = response.output_tokens
    return b"".join(TEXTS[token - 2] for token in (ids[:-1] if ids[-1] == EOS else ids))


@dataclass(frozen=True)
class Language:
    """A grammar by its definition."""

    fields: dict
    begins: Callable[[bytes], bool]
    """True for what is the beginning of an output."""
    has: Callable[[bytes], bool]
    """True for a whole output."""

    def allowed(self, so_far):
        """Tokens that may come next."""
        found = {2 + at for at, text in enumerate(TEXTS) if self.begins(so_far + text)}
        return found | ({EOS} if self.has(so_far) else set())


def allowed_at(language, so_far, tops):
    """Tokens that may come next, in order. Where one text has to come, a single one spells it."""
    allowed = language.allowed(so_far)
    assert set(tops) <= allowed
    if set(tops) == allowed:
        return sorted(allowed)
    texts = sorted(TEXTS[token - 2] for token in allowed)  # fails on the end
    assert all(two.startswith(one) for one, two in pairwise(texts))
    assert len(tops) == 1
    return list(tops)


def finite(fields, texts):
    """A language by all its outputs."""
    whole = {text.encode() for text in texts}
    starts = {text[:count] for text in whole for count in range(len(text) + 1)}
    return Language(fields, starts.__contains__, whole.__contains__)


def compact(value):
    return json.dumps(value, separators=(",", ":"))


WORDS = finite(
    {"regex": "(AB|ABA|C€|12){1,3}"},
    ("".join(w) for n in (1, 2, 3) for w in product(["AB", "ABA", "C€", "12"], repeat=n)),
)
FLAGS = [list(flags) for count in range(3) for flags in product([True, False], repeat=count)]
OBJECTS = finite(
    {
        "json_schema": {
            "type": "object",
            "properties": {
                "a": {"enum": [1, 12, "AB", True, None]},
                "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["a"],
            "additionalProperties": False,
        }
    },
    (
        compact({"a": a} | b)
        for a in (1, 12, "AB", True, None)
        for b in ({}, *({"b": flags} for flags in FLAGS))
    ),
)
LINE = 120


def is_line(text):
    return len(text) <= LINE and all(
        byte in (b"-" if at % 4 == 3 else b"ABC") for at, byte in enumerate(text)
    )


LONG = Language(
    {"regex": f"([ABC]{{3}}-){{{LINE // 4}}}"},
    is_line,
    lambda text: is_line(text) and len(text) == LINE,
)
WAYS = [
    {},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.7, "logit_bias": {4: 2.0, 40: -3.0}, "presence_penalty": 0.8},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"top_p": 0.8, "repetition_penalty": 1.3},
]


@torch.no_grad()
def check_row(model, language, asked, response):
    """Each token is allowed, and all that is reported is over what is allowed."""
    gconfig, prompt = asked.gconfig, list(asked.input_ids)
    table = reference_logits(model, prompt + response.output_tokens).tolist()
    scale = gconfig.temperature or 1.0
    positions = iter([] if response.sampling_mask is None else response.sampling_mask.counts)
    masks = iter([] if response.sampling_mask is None else response.sampling_mask.tokens)
    so_far = b""
    for at, token in enumerate(response.output_tokens):
        tops = dict(response.top_logprobs[at])
        allowed = allowed_at(language, so_far, tops)
        assert token in allowed
        logits = slow_logits(
            table[len(prompt) - 1 + at], gconfig, prompt, response.output_tokens[:at]
        )
        logprobs = dict(
            zip(allowed, slow_logprobs([logits[t] / scale for t in allowed]), strict=True)
        )
        assert errors(tops.values(), torch.tensor([logprobs[t] for t in tops])).max() < 1e-4
        left = {next(masks) for _ in range(next(positions, 0))}
        if left:
            assert left <= set(allowed)
            assert (
                len(left) == min(len(allowed), gconfig.top_k or len(allowed)) or gconfig.top_p < 1
            )
            total = torch.tensor([logprobs[t] for t in left]).logsumexp(0).item()
            logprobs = {t: logprobs[t] - total for t in left}
        assert response.output_logprobs[at] == pytest.approx(logprobs[token], abs=1e-4)
        if token != EOS:
            so_far += TEXTS[token - 2]
    assert language.has(so_far)
    assert (response.stop_reason, response.stop_match) == ("stop", EOS)


@pytest.mark.parametrize("on", ["slabs", "blocks"])
async def test_tokens_are_drawn_from_what_may_come_next_and_logprobs_are_over_it(folders, on):
    rows = [
        (
            language,
            bound(f"{n}-{way}", prompt_of(4 + way, way), top_logprobs=64, seed=way, **fields),
        )
        for n, language in enumerate((WORDS, OBJECTS))
        for way, options in enumerate(WAYS)
        for fields in [options | language.fields]
    ]
    rows += [
        (language, asked.model_copy(update={"rid": f"m{asked.rid}", "sampling_mask": True}))
        for language, asked in rows
    ]
    device = PagedCpu() if on == "blocks" else None
    async with serving(folders[0], max_sequences=len(rows), device=device) as backend:
        responses = await generate_all(backend, [asked for _, asked in rows])
    model = load_reference(folders[0]).double()
    for (language, asked), response in zip(rows, responses, strict=True):
        is_cut = asked.sampling_mask and asked.gconfig.temperature > 0
        assert (response.sampling_mask is not None) == is_cut
        check_row(model, language, asked, response)
    assert len({text_of(response) for response in responses}) > 5


SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "ref": {"type": "string", "maxLength": 6},
            "len": {"type": "integer", "minimum": -20, "maximum": 300},
            "tabs": {"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 3},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
        },
        "required": ["ref", "len", "tabs", "next"],
        "additionalProperties": False,
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "boolean"}, {"type": "string", "pattern": "^[ab]{2}$"}],
                "items": False,
                "minItems": 2,
            }
        },
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9},
]
PATTERNS = [r"\d{2,5}(\.\d{1,3})?", "-?(AB)+|null{2}", "[^A-C]{7}", "(?i)abc|true|"]


@pytest.mark.parametrize("guesses", [0, 6])
async def test_outputs_match_and_neighbours_are_as_if_they_were_alone(folders, guesses):
    grammars = [{"json_schema": s} for s in SCHEMAS] + [{"regex": p} for p in PATTERNS]
    rows = [
        bound(f"g{kind}-{seed}", prompt_of(3 + seed, seed), seed=seed, **fields)
        for seed in range(6)
        for kind, fields in enumerate(grammars)
    ]
    free = [request(f"f{i}", prompt_of(3 + i, i), seed=i, max_new_tokens=40) for i in range(6)]
    mixed = [*rows[:10], *free, *rows[10:]]
    async with serving(folders[0], max_sequences=12, speculative_tokens=guesses) as backend:
        alone = await generate_all(backend, free)
        beside = {r.rid: r for r in await generate_all(backend, mixed)}
    for asked in rows:
        response = beside[asked.rid]
        assert response.stop_reason == "stop", text_of(response)
        text = text_of(response).decode()
        if asked.gconfig.regex is None:
            jsonschema.validate(json.loads(text), asked.gconfig.json_schema)
        else:
            assert re.fullmatch(asked.gconfig.regex, text)
    assert len({text_of(beside[asked.rid]) for asked in rows}) > 20
    for before in alone:
        after = beside[before.rid]
        assert after.output_tokens == before.output_tokens
        assert errors(after.output_logprobs, torch.tensor(before.output_logprobs)).max() < 1e-5


@torch.no_grad()
def replay(models, asked, response):
    """Logprobs over one kept cache and what is allowed, each token by the version that sampled it."""
    cache = DynamicCache()
    fed, so_far, logprobs = list(asked.input_ids), b"", []
    rows = (response.output_tokens, response.output_versions, response.top_logprobs)
    for token, version, tops in zip(*rows, strict=True):
        logits = extend_cache(models[version], cache, fed)[-1].double()
        allowed = allowed_at(LONG, so_far, dict(tops))
        logprobs.append(torch.log_softmax(logits[allowed], dim=-1)[allowed.index(token)])
        fed = [token]
        so_far += TEXTS[token - 2] if token != EOS else b""
    return torch.stack(logprobs)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_a_swap_in_flight_goes_on_in_the_grammar(folders, policy):
    rows = [
        bound(f"r{i}", prompt_of(5 + i, i), top_logprobs=64, seed=i, **LONG.fields)
        for i in range(3)
    ]
    async with serving(folders[0]) as backend:
        update = stage(1, folders[1])
        calls = [Call(backend, asked) for asked in rows]
        await calls[0].heard.until(10)
        assert await backend.swap(update, policy) == 3
        responses = [await call.response() for call in calls]
    models = [load_reference(folder) for folder in folders]
    for asked, response in zip(rows, responses, strict=True):
        assert LONG.has(text_of(response))
        assert [version for version, _, _ in response.version_runs] == [0, 1]
        if policy == "keep":
            expected = replay(models, asked, response)
            assert errors(response.output_logprobs, expected).max() < 1e-4
        else:
            assert response.num_recomputes == 1


async def test_rows_that_were_taken_away_go_on_in_the_grammar(folders):
    rows = [bound(f"r{i}", prompt_of(20 + i, i), seed=i, **LONG.fields) for i in range(6)]
    async with serving(folders[0], max_sequences=6) as backend:
        ample = await generate_all(backend, rows)
    async with serving(folders[0], max_sequences=6, kv_cache_bytes=1 << 17) as backend:
        short = await generate_all(backend, rows)
        assert backend.load().preemptions > 0
    for before, after in zip(ample, short, strict=True):
        assert LONG.has(text_of(after))
        assert after.output_tokens == before.output_tokens
        assert errors(after.output_logprobs, torch.tensor(before.output_logprobs)).max() < 1e-4
    assert any(response.num_recomputes for response in short)


async def test_what_ends_early_is_the_beginning_of_an_output(folders):
    stop = TEXTS.index(b"-") + 2
    rows = [
        bound("length", [3, 4], seed=1, **LONG.fields | {"max_new_tokens": 9}),
        bound("token", [3, 4], seed=1, **LONG.fields | {"stop_token_ids": (stop,)}),
        bound("string", [3, 4], seed=1, **LONG.fields | {"stop": ("-",)}),
    ]
    whole = bound("abort", [3, 4], seed=1, **LONG.fields)
    async with serving(folders[0], max_sequences=4) as backend:
        running = Call(backend, whole)
        length, token, string = await generate_all(backend, rows)
        await running.heard.until(5)
        await backend.abort("abort")
        aborted = await running.response()
    assert (length.stop_reason, len(length.output_tokens)) == ("length", 9)
    assert token.stop_reason == string.stop_reason == "stop"
    assert token.output_tokens[-1] == stop
    assert b"-" in text_of(string)
    assert aborted.stop_reason == "interrupt"
    for response in (length, token, string, aborted):
        assert LONG.begins(text_of(response))
    with pytest.raises(BackendError, match="json_schema and regex begin with the first one"):
        rest_of(whole, aborted)


def test_text_that_has_to_come_is_spelled_without_the_blank_that_some_tokenizers_put_in_front(
    tmp_path,
):
    names = ["<unk>", "</s>", "▁", *"ABtrue", "tr", "ue", "true", "▁true", "▁A", "AB"]
    numbers = {name: number for number, name in enumerate(names)}
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ("▁", "true"), ("▁", "A"), ("A", "B")]
    tokenizer = Tokenizer(BPE(numbers, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    known = TextTokenizer(str(tmp_path))
    assert known.encode("true", add_special_tokens=False) == [numbers["▁true"]]
    grammars = grammar.Grammars(known, len(names), frozenset({1}))
    state = grammars.state_of(SamplingConfig(regex="(AB|BA)true"))
    for name, allowed in (("AB", {"A", "B", "AB"}), ("true", {"true"}), ("</s>", {"</s>"})):
        assert {names[token] for token in state.allowed().nonzero()[0]} == allowed
        state.take(numbers[name])


DAMAGED = {
    "open bracket": ({"regex": "(AB"}, "unclosed group"),
    "look-ahead": ({"regex": "(?=A)B"}, "look-around"),
    "reference": ({"regex": r"(A)\1"}, "backreferences"),
    "type": ({"json_schema": {"type": "nonsense"}}, "Invalid type: nonsense"),
    "properties": ({"json_schema": {"type": "object", "properties": 3}}, "properties must be"),
    "nowhere": ({"json_schema": {"$ref": "#/nowhere"}}, "'/nowhere' does not exist"),
    "elsewhere": ({"json_schema": {"$ref": "http://example.com/x"}}, "does not fetch"),
    "not supported": ({"json_schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
    "empty": ({"json_schema": {"enum": []}}, "Unsatisfiable"),
}


async def test_a_damaged_grammar_is_refused_and_says_why(folders, llama_dir):
    async with serving(folders[0]) as backend:
        for fields, why in DAMAGED.values():
            with pytest.raises(
                DataError, match="json_schema or regex cannot be followed"
            ) as raised:
                await backend.generate(bound("r", [3], **fields))
            assert why in raised.value.message
        assert backend.load().running == backend.load().queued == 0
        response = await backend.generate(bound("r", [3], regex="AB"))
        assert text_of(response) == b"AB"
    async with serving(llama_dir) as backend:
        with pytest.raises(DataError, match="need a tokenizer and an end of sequence"):
            await backend.generate(bound("r", [3], regex="AB"))


def test_fields_that_contradict_a_grammar_are_refused():
    schema = {"json_schema": {"type": "boolean"}}
    for fields, why in (
        (schema | {"regex": "A"}, "send one of them"),
        (schema | {"ignore_eos": True}, "leave out ignore_eos"),
        ({"regex": "A", "min_new_tokens": 3}, "min_new_tokens"),
        ({"json_schema": {"const": "x" * (1 << 16)}}, "at most 65536 are read"),
        ({"regex": ""}, "at least 1 character"),
        ({"regex": "A" * 4097}, "at most 4096"),
    ):
        with pytest.raises(ValidationError, match=why):
            SamplingConfig(**fields)


async def test_a_grammar_that_becomes_too_complex_fails_alone(folders, monkeypatch):
    limits = LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=20_000,
        step_max_items=10_000,
        max_lexer_states=60,
        verbose_errors=False,
    )
    monkeypatch.setattr(grammar, "LIMITS", limits)
    rows = [
        bound("costly", prompt_of(5, 1), regex="[AB]{150}"),
        bound("cheap", prompt_of(5, 2), regex="AB+", logit_bias={EOS: 100.0}),
        request("free", prompt_of(5, 3), max_new_tokens=100),
    ]
    async with serving(folders[0]) as backend:
        running = [Call(backend, asked) for asked in rows]
        ended = await asyncio.gather(*(c.response() for c in running), return_exceptions=True)
        assert backend.failure is None
        assert backend.load().running == 0
    assert isinstance(ended[0], DataError)
    assert "too many states" in ended[0].message
    assert len(running[0].heard.tokens) > 5
    assert re.fullmatch(b"AB+", text_of(ended[1]))
    assert len(ended[2].output_tokens) == 100
