"""Text as it grows: no half characters, no stop strings, and the pieces are the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headway.text.streaming import PART, UNFINISHED, TextStream, token_texts
from headway.text.tokenizer import TextTokenizer

END = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """One token per byte, and `<end>`."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(BPE(alphabet, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken("<end>")])
    folder = tmp_path_factory.mktemp("bytes")
    model.save(str(Path(folder) / "tokenizer.json"))
    return TextTokenizer(str(folder))


def pieces_of(stream: TextStream, ids: list[int], stop_match=None, size: int = 1) -> list[str]:
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [*(stream.feed(part) for part in parts), stream.finish(stop_match)]


@given(text=st.text(max_size=40), size=st.integers(1, 7))
def test_pieces_are_the_text_and_hold_whole_characters(tokenizer, text, size):
    ids = tokenizer.encode(text)
    pieces = pieces_of(TextStream(tokenizer), ids, size=size)
    assert "".join(pieces) == text
    assert UNFINISHED in text or not any(UNFINISHED in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, END), max_size=80), size=st.integers(1, 7))
def test_pieces_of_any_bytes_are_what_the_tokenizer_decodes(tokenizer, ids, size):
    assert "".join(pieces_of(TextStream(tokenizer), ids, size=size)) == tokenizer.decode(ids)


def test_bytes_that_never_become_a_character_do_not_pile_up(tokenizer):
    stream = TextStream(tokenizer)
    broken = tokenizer.encode("é")[:1] * 40
    text = stream.feed(broken)
    assert 20 <= len(text) < 40
    assert text + stream.finish() == UNFINISHED * 40


def test_a_character_is_held_until_its_last_byte(tokenizer):
    stream = TextStream(tokenizer)
    assert [stream.feed([token]) for token in tokenizer.encode("é😀")] == [
        "",
        "é",
        "",
        "",
        "",
        "😀",
    ]


def test_what_may_begin_a_stop_string_is_held_and_given_back(tokenizer):
    stream = TextStream(tokenizer, ["END!"])
    pieces = [stream.feed(tokenizer.encode(c)) for c in "xEN EEND"]
    assert pieces == ["x", "", "", "EN ", "", "E", "", ""]
    assert stream.finish() == "END"


def test_a_stop_string_is_cut_from_the_text(tokenizer):
    for size in (1, 3, 100):
        stream = TextStream(tokenizer, ["zz", "STOP"])
        ids = tokenizer.encode("one STOP")
        assert "".join(pieces_of(stream, ids, "STOP", size)) == "one "


def test_a_stop_string_that_ended_nothing_stays(tokenizer):
    """Before `min_tokens` a stop string is text like any other."""
    for size in (1, 3, 100):
        stream = TextStream(tokenizer, ["ab"])
        ids = tokenizer.encode("-ab-ab")
        assert "".join(pieces_of(stream, ids, "ab", size)) == "-ab-"


def test_a_stop_token_is_left_out_only_where_it_stopped(tokenizer):
    (bar,) = tokenizer.encode("|")
    for size in (1, 2, 100):
        stream = TextStream(tokenizer, stop_token_ids=[bar])
        assert "".join(pieces_of(stream, tokenizer.encode("a|b|"), bar, size)) == "a|b"
        stream = TextStream(tokenizer, stop_token_ids=[bar])
        assert "".join(pieces_of(stream, tokenizer.encode("a|b|"), None, size)) == "a|b|"


def test_special_tokens_are_left_out_unless_wanted(tokenizer):
    ids = [*tokenizer.encode("a"), END]
    assert "".join(pieces_of(TextStream(tokenizer), ids)) == "a"
    shown = TextStream(tokenizer, skip_special_tokens=False)
    assert "".join(pieces_of(shown, ids)) == "a<end>"


def test_no_tokenizer_gives_no_text():
    assert pieces_of(TextStream(None, stop_token_ids=[2]), [1, 2, 3]) == ["", "", "", ""]


@given(
    text=st.text(alphabet="abc", max_size=30), stop=st.text(alphabet="abc", min_size=1, max_size=4)
)
def test_no_piece_reaches_into_a_stop_string(tokenizer, text, stop):
    """The sequence ends where a stop string is complete, as it does in an engine."""
    end = text.find(stop)
    ids = tokenizer.encode(text if end < 0 else text[: end + len(stop)])
    pieces = pieces_of(TextStream(tokenizer, [stop]), ids, None if end < 0 else stop)
    assert "".join(pieces) == (text if end < 0 else text[:end])


def test_token_bytes_are_the_bytes_of_the_text(tokenizer):
    text = "naïve 😀\n"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert tokenizer.token_bytes(END) == b"<end>"
    assert tokenizer.token_bytes(END + 1) == b""


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([b"a", b"\xc3", b"\xa9", b"b"], ["a", PART, "é", "b"]),
        ([b" \xf0\x9f", b"\x98", b"\x80!"], [" ", PART, "😀!"]),
        ([b"\xe2\x82", b"\xac\xe2", b"\x82\xac"], [PART, "€", "€"]),
        ([b"\xc3", b"x"], [PART, UNFINISHED + "x"]),
        ([b"ok", b"\xf0\x9f", b"\x98"], ["ok", PART, UNFINISHED]),
        ([b"a\xc3", b""], ["a" + UNFINISHED, ""]),
        ([b"\xff", b""], [UNFINISHED, ""]),
        ([], []),
    ],
    ids=["two", "four", "shared", "broken", "cut", "half", "never", "none"],
)
def test_a_split_character_stands_with_the_token_that_completes_it(tokens, texts):
    assert token_texts(tokens) == texts


@given(text=st.text(max_size=40))
def test_texts_of_tokens_without_their_marks_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    texts = token_texts(map(tokenizer.token_bytes, ids))
    assert len(texts) == len(ids)
    if PART not in text:
        assert "".join(texts).replace(PART, "") == text
