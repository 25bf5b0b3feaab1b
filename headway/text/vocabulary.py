"""What a tokenizer and a model must agree on, for token ids to mean the same to both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from tokenizers import Tokenizer

from headway.contracts.http.servers import ServerReport

SHOWN = 12
"""Characters of a digest in messages."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a gateway; None is not known, and compared with nothing."""

    num_tokens: int | None = None
    """The tokenizer's ids are below it."""
    model_size: int | None = None
    """Ids that the model samples are below it; most models have more rows than their tokenizer tokens."""
    digest: str | None = None
    """See `tokenizer_digest`."""

    def mismatch(self, report: ServerReport) -> str:
        """Return why a server cannot be given these token ids; empty if it can."""
        theirs = report.tokenizer_digest
        if theirs is not None and self.digest is not None:
            # Equal tokenizers may have more tokens than their model, for images for example.
            return "" if theirs == self.digest else self._refusal(report, "another tokenizer")
        if report.vocab_size is not None and report.vocab_size < (self.num_tokens or 0):
            return self._refusal(report, "a smaller vocabulary")
        return ""

    def _refusal(self, report: ServerReport, what: str) -> str:
        return (
            f"its model has {what} than this gateway: {report.vocab_size} token ids and tokenizer "
            f"{(report.tokenizer_digest or 'unknown')[:SHOWN]}, the gateway's tokenizer has "
            f"{self.num_tokens} tokens and is {(self.digest or 'unknown')[:SHOWN]}; start the gateway "
            "with the tokenizer of the model that this server runs, or the server with that model"
        )


ANY = Vocabulary()
"""Fits every server."""


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of what decides the ids of a text, however the file is written.

    It covers vocabulary, merges, added tokens, normalizer and pre-tokenizer; not templates, padding or
    truncation.
    """
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    merges = [
        pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())
    ]
    added = sorted((token["id"], token["content"]) for token in state["added_tokens"])
    parts = [model.get("type"), model["vocab"], merges, added]
    parts += [state["normalizer"], state["pre_tokenizer"]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
