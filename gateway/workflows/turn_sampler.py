"""The turns of one sample: each asks with the row so far, under a name and a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from gateway.rewards.base import Answer
from gateway.trajectories.sample import Sample
from gateway.trajectories.transcript import Transcript
from gateway.workflows.base import RolloutContext
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import RequestTooLong
from headway.contracts.types import LLMRequest, LLMResponse, RewardResult
from headway.runtime.offload import offload
from headway.text.tokenizer import TextTokenizer

SEEDS = 2**63
MAX_NAME_CHARS = 128
"""Maximum characters of an `Identifier`."""


class TurnSampler:
    """Runs one sample, turn by turn, into one row."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        gconfig: SamplingConfig,
        sample: Sample,
        context: RolloutContext,
        opening: Sequence[int],
        max_tokens: int | None = None,
    ) -> None:
        """
        Args:
            opening: the prompt's tokens.
            max_tokens: of the whole row; None leaves the bound to the server.
        """
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._sample = sample
        self._context = context
        self._opening = list(opening)
        self._max_tokens = max_tokens
        self._requests = 0
        self.transcript = Transcript(opening)

    async def next_turn(self, shown: Sequence[int] = ()) -> LLMResponse | None:
        """Sample one turn; None if the row has no room for one: it then stays as it was.

        Args:
            shown: tokens that the policy is shown in front of the turn.

        Raises:
            RequestTooLong: the prompt alone leaves no room.
        """
        response = await self._ask(shown)
        if response is None:
            if not self.transcript.turns:
                raise RequestTooLong(self._no_room())
            return None
        self.transcript.observe(shown)
        self.transcript.sample(response)
        return response

    async def candidate(self) -> LLMResponse:
        """Sample what may become the turn: `transcript.sample` makes it so.

        Raises:
            RequestTooLong: the row leaves no room.
        """
        response = await self._ask(())
        if response is None:
            raise RequestTooLong(self._no_room())
        return response

    async def completion(self) -> str:
        """The text of the last turn."""
        ids = self.transcript.ids_of(-1)
        return await offload(len(ids), self._tokenizer.decode, ids)

    async def score(self) -> RewardResult:
        """Return the submitted reward's score of the last turn."""
        return await self.score_completion(self.transcript.ids_of(-1))

    async def score_completion(self, completion_ids: list[int]) -> RewardResult:
        """Return the submitted reward's score of an answer to the prompt."""
        prompt = self._sample.prompt
        size = len(self._opening) + len(completion_ids)
        shown, said = await offload(size, self._texts, completion_ids)
        return await self._context.score(
            Answer(
                prompt=shown,
                completion=said,
                data=prompt.data,
                prompt_ids=self._opening,
                completion_ids=completion_ids,
                messages=[message.model_dump() for message in prompt.messages or ()],
            )
        )

    def _texts(self, completion_ids: list[int]) -> tuple[str, str]:
        return self._tokenizer.decode(self._opening), self._tokenizer.decode(completion_ids)

    async def _ask(self, shown: Sequence[int]) -> LLMResponse | None:
        ids = (*self.transcript.ids, *shown)
        gconfig = self._next_gconfig(len(ids))
        if gconfig is None:
            return None
        request = LLMRequest(
            rid=request_name(self._sample, self._requests),
            input_ids=ids,
            gconfig=gconfig,
            metadata={"group_id": self._sample.prompt.group_id},
        )
        self._requests += 1
        try:
            return await self._context.generate(request)
        except RequestTooLong:
            if not self.transcript.turns:
                raise
            return None

    def _next_gconfig(self, length: int) -> SamplingConfig | None:
        """The sampling of the next request; None if the row leaves nothing to sample."""
        gconfig = self._gconfig
        changed: dict[str, int] = {}
        if self._max_tokens is not None:
            room = self._max_tokens - length
            if room < 1:
                return None
            if room < gconfig.max_new_tokens:
                changed["max_new_tokens"] = room
                changed["min_new_tokens"] = min(gconfig.min_new_tokens, room)
        if gconfig.seed is not None:  # siblings and turns of a seeded group must differ
            step = self._sample.index + self._requests * self._sample.prompt.group_size
            changed["seed"] = (gconfig.seed + step) % SEEDS
        return gconfig.model_copy(update=changed)

    def _no_room(self) -> str:
        return (
            f"the prompt of group {self._sample.prompt.group_id!r} has {len(self._opening)} tokens, "
            f"max_tokens={self._max_tokens} of the row leaves none to sample; raise it"
        )


def request_name(sample: Sample, number: int) -> str:
    """Return a `rid` for one request of a sample; a long rollout id is truncated and ends in its hash."""
    name = f"{sample.rollout_id}.{sample.index}" + (f".{number}" if number else "")
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name[: MAX_NAME_CHARS - len(digest) - 1]}.{digest}"
