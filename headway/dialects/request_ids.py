"""Ids that clients gave to requests, whichever dialect they speak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fastapi import Request

from headway.dialects.error_shapes import InvalidField
from headway.dialects.served_model import ServedModel


class RequestIds:
    """A client's ids in flight, each with those of its sequences."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._claimed: dict[str, Sequence[str]] = {}

    @contextmanager
    def claim(self, ids: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Hold a client's ids until the block ends.

        Args:
            ids: the client's, each with those of its sequences.
        Raises:
            InvalidField: one is in use.
        """
        for each in ids:
            if each in self._claimed:
                raise InvalidField(f"Duplicate request ID detected: {each}", "rid")
        self._claimed.update(ids)
        try:
            yield
        finally:
            for each in ids:
                del self._claimed[each]

    async def abort(self, given: str | None) -> None:
        """End one request of a client, with all of its sequences, or all requests."""
        for each in self.sequences(given):
            await self._model.abort(each)

    def sequences(self, given: str | None) -> Sequence[str | None]:
        """Return the ids of a client's request as the model has them; None is all requests."""
        return [None] if given is None else self._claimed.get(given, [given])


def request_ids(request: Request) -> RequestIds:
    """The ids in flight at an app (`app.state.request_ids`)."""
    ids: RequestIds = request.app.state.request_ids
    return ids
