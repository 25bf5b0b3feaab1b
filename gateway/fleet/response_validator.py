"""Limits on a fleet's answers: tokens of its vocabulary, and versions that were published."""

from __future__ import annotations

from gateway.versions.publication_state import PublicationState
from headway.contracts.errors import StateError
from headway.contracts.types import LLMResponse
from headway.runtime.server_calls import MAX_TOKEN_ID, invalid_generation


class ResponseValidator:
    """Tells the servers that sample from those that make answers up."""

    def __init__(self, state: PublicationState, vocab_size: int | None = None) -> None:
        """Args:
        state: knows the newest version.
        vocab_size: of the model; None is not known.
        """
        self._state = state
        self.vocab_size = MAX_TOKEN_ID if vocab_size is None else vocab_size

    def knows(self, response: LLMResponse) -> bool:
        """True if all its versions were published, as far as this gateway has heard."""
        newest = self._state.newest
        for version, _, _ in response.version_runs:  # noqa: SIM110 - `all` takes three times as long
            if version > newest:
                return False
        return True

    async def check(self, response: LLMResponse, url: str) -> None:
        """Refuse tokens of a version that was never published, which this gateway does not know.

        Raises:
            BackendError: there are some.
        """
        version = max(version for version, _, _ in response.version_runs)
        try:
            await self._state.refresh()  # another gateway may have published it just now
        except StateError:
            return  # nobody can say; what can be sampled is not lost for that
        if version > self._state.newest:
            raise invalid_generation(
                url, f"version {version}, the newest that was published is {self._state.newest}"
            )
