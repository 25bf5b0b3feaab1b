"""Gateway and server find out that their token ids mean something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from headway.contracts.http.servers import ServerReport
from headway.text.tokenizer import TextTokenizer
from headway.text.vocabulary import Vocabulary, tokenizer_digest

VOCAB = {"a": 0, "b": 1, "ab": 2}


def make(vocab: dict[str, int] = VOCAB, *added: str, splits: bool = False) -> Tokenizer:
    merges = [("a", "b")] if "ab" in vocab else []
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_tokens([AddedToken(token) for token in added])
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_a_digest_is_of_what_decides_ids_and_not_of_how_it_is_written(tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    tokenizer = make()
    tree = json.loads(tokenizer.to_str())
    tree["model"]["merges"] = ["a b"]  # as older files have them
    tree["model"]["vocab"] = dict(reversed(VOCAB.items()))
    tree["truncation"] = {
        "direction": "Right",
        "max_length": 9,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(tree, indent=3))
    digest = TextTokenizer(str(tmp_path)).vocabulary.digest
    assert digest == tokenizer_digest(tokenizer)
    others = [
        make({"a": 0, "b": 1}),
        make({"a": 1, "b": 0, "ab": 2}),
        make(VOCAB, "c"),
        make(splits=True),
    ]
    assert len({digest, *map(tokenizer_digest, others)}) == 5


@pytest.mark.parametrize(
    ("size", "digest", "problem"),
    [
        (4096, "other", "another tokenizer than this gateway: 4096 token ids and tokenizer other"),
        (4096, None, "a smaller vocabulary than this gateway"),
        (4096, "same", ""),  # what the model cannot read is in both, as a token for images
        (152_064, None, ""),  # embeddings are padded
        (152_064, "same", ""),
        (None, None, ""),
    ],
)
def test_a_server_fits_if_ids_mean_the_same(size: int | None, digest: str | None, problem: str):
    report = ServerReport(
        server_id="s", url="http://s", version=0, vocab_size=size, tokenizer_digest=digest
    )
    mismatch = Vocabulary(num_tokens=151_669, model_size=151_936, digest="same").mismatch(report)
    assert problem in mismatch and bool(mismatch) == bool(problem)
    assert Vocabulary().mismatch(report) == ""
