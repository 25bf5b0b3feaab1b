"""A generation backend of one's own: the embedded one, which computes an equal greedy request once."""

from typing import Any

from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from inference_server.backends.base import OnDelta, register_backend
from inference_server.backends.embedded.backend import EmbeddedTorchBackend

Key = tuple[Any, ...]


class RememberingBackend(EmbeddedTorchBackend):
    """Answers from memory where the answer follows from the request: at temperature 0, and while the
    version that answered serves."""

    class Args(EmbeddedTorchConfig):
        """The settings of the embedded backend, and one more."""

        max_remembered: int = 10_000
        """Answers to keep; the oldest is forgotten."""

    def __init__(self, args: Args, *parts: Any) -> None:
        super().__init__(args, *parts)
        self._max = args.max_remembered
        self._answers: dict[Key, LLMResponse] = {}

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        """Sample one sequence, or give the answer that an equal request got."""
        key = (self.version, req.model_dump_json(exclude={"rid", "metadata"}))
        known = self._answers.get(key)
        if known is None or self.is_paused:
            response = await super().generate(req, on_delta)
            is_whole = response.stop_reason != "interrupt"
            if req.gconfig.temperature == 0.0 and is_whole and self.version == key[0]:
                self._answers[key] = response
                if len(self._answers) > self._max:
                    del self._answers[next(iter(self._answers))]
            return response
        if on_delta is not None:
            tokens, logprobs = known.output_tokens, known.output_logprobs
            fields = {"output_tokens": tokens, "output_logprobs": logprobs}
            on_delta(LLMDelta(**fields, version=self.version, top_logprobs=known.top_logprobs))
        return known.model_copy(update={"rid": req.rid, "latency_s": 0.0, "ttft_s": 0.0})


register_backend("remembering", RememberingBackend)
