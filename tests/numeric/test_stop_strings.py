"""Stop strings against a slow loop that decodes the whole output after every token."""

from __future__ import annotations

import json

import pytest

from headway.text.tokenizer import TextTokenizer
from tests.numeric.backends import Heard, generate_all, prompt_of, request, serving
from tests.numeric.models import VOCAB_SIZE, save_model, write_char_tokenizer


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """One token per character."""
    folder = save_model(tmp_path_factory.mktemp("letters"), "llama")
    write_char_tokenizer(folder)
    return folder


BYTES = "a€é".encode()
"""a, then € (three bytes) and é (two): token 2 + i is byte i."""


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory):
    """One token per byte, in GPT-2's alphabet: the bytes inside of a character are no text yet."""
    folder = save_model(tmp_path_factory.mktemp("bytes"), "llama")
    names = [chr(byte) if chr(byte).isprintable() else chr(byte + 162) for byte in BYTES]
    vocabulary = {"<s>": 0, "</s>": 1, **{name: 2 + i for i, name in enumerate(names)}}
    spare = {f"<spare{i}>": i for i in range(len(vocabulary), VOCAB_SIZE)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "WordLevel", "vocab": vocabulary | spare, "unk_token": "<s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokens = list(range(2, 2 + len(BYTES)))
    assert TextTokenizer(str(folder)).decode(tokens) == BYTES.decode()
    return folder


def text_of_letters(tokens):
    return "".join(chr(ord(" ") + token - 2) for token in tokens)


def text_of_bytes(tokens):
    return bytes(BYTES[token - 2] for token in tokens).decode(errors="replace")


def slow_end(text_of, tokens, stops, min_new_tokens=0):
    """(tokens until a stop string is complete, the string), by the text of everything so far."""
    for count in range(max(1, min_new_tokens), len(tokens) + 1):
        text = text_of(tokens[:count])
        for stop in stops:
            if text.endswith(stop):
                return count, stop
    return len(tokens), None


async def free_and_stopped(folder, asked_stops, count=24, **gconfig):
    """The same seeded requests without and with stop strings."""
    options = {"max_new_tokens": 80} | gconfig
    plain = [request(f"f{i}", prompt_of(4, i), seed=i, **options) for i in range(count)]
    stopping = [
        request(f"s{i}", prompt_of(4, i), seed=i, stop=asked_stops, **options) for i in range(count)
    ]
    async with serving(folder, max_sequences=2 * count) as backend:
        responses = await generate_all(backend, plain + stopping)
    return responses[:count], responses[count:]


def assert_ends(text_of, free, stopped, stops, min_new_tokens=0):
    seen = set()
    for whole, cut in zip(free, stopped, strict=True):
        count, match = slow_end(text_of, whole.output_tokens, stops, min_new_tokens)
        assert cut.output_tokens == whole.output_tokens[:count]
        assert cut.stop_match == match
        assert cut.stop_reason == ("length" if match is None else "stop")
        assert len(cut.output_logprobs) == count
        seen.add(match)
    return seen


def only(tokens):
    """Only these tokens can be sampled."""
    return {"logit_bias": {t: -100.0 for t in range(VOCAB_SIZE) if t not in tokens}}


LETTERS = {"A": 35, "B": 36, "C": 37}


@pytest.mark.parametrize("stops", [("A",), ("ABC",), ("CAB", "BB"), ("AAAAAA", "BCBC", "CCC")])
async def test_a_string_over_several_tokens_ends_the_sequence_and_stays_in_it(letters, stops):
    free, stopped = await free_and_stopped(letters, stops, **only(LETTERS.values()))
    assert assert_ends(text_of_letters, free, stopped, stops) - {None}


@pytest.mark.parametrize("stops", [("€",), ("é",), ("a€",), ("€é", "éa")])
async def test_characters_of_several_tokens_end_with_their_last_byte(byte_tokens, stops):
    tokens = {2 + BYTES.index(byte) for stop in stops for byte in stop.encode()}
    # Hot enough for any order of bytes, and cold enough for the bias to forbid the others.
    gconfig = only(tokens) | {"temperature": 5.0, "max_new_tokens": 200}
    free, stopped = await free_and_stopped(byte_tokens, stops, **gconfig)
    assert assert_ends(text_of_bytes, free, stopped, stops) - {None}


@pytest.mark.parametrize("min_new_tokens", [1, 10, 40])
async def test_strings_that_are_complete_too_early_end_nothing(letters, min_new_tokens):
    stops = ("AB", "CC")
    gconfig = only(LETTERS.values()) | {"min_new_tokens": min_new_tokens}
    free, stopped = await free_and_stopped(letters, stops, **gconfig)
    assert assert_ends(text_of_letters, free, stopped, stops, min_new_tokens) >= {"AB", "CC"}
    assert all(len(r.output_tokens) >= min_new_tokens for r in stopped)


async def test_deltas_of_a_stopped_sequence_are_its_whole_response(letters):
    heard = Heard()
    asked = request("r", prompt_of(4, 1), seed=1, stop=("AB",), **only(LETTERS.values()))
    async with serving(letters) as backend:
        response = await backend.generate(asked, heard)
    assert response.stop_reason == "stop"
    assert heard.tokens == response.output_tokens
    text = TextTokenizer(str(letters)).decode(heard.tokens)
    assert text.index("AB") == len(text) - 2


async def test_the_end_of_sequence_comes_before_a_string(letters):
    """Special tokens are no text: they neither complete nor break a stop string."""
    async with serving(letters) as backend:
        response = await backend.generate(
            request("r", [3], seed=0, stop=("A",), ignore_eos=False, logit_bias={1: 100.0})
        )
    assert (response.stop_reason, response.stop_match) == ("stop", 1)
