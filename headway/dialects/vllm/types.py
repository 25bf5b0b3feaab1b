"""Requests of vLLM's clients beyond OpenAI's, field by field: honoured, or refused by name."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import Field, JsonValue

from headway.contracts.config.base import Identifier
from headway.contracts.types import TokenId
from headway.dialects.error_shapes import InvalidField
from headway.dialects.openai.fields import StreamOptions
from headway.dialects.structured_output import StructuredOutputs
from headway.dialects.unsupported import RequestPart, unsupported
from headway.dialects.version_wanted import VersionWanted

IN_THE_TEXT = "answers hold token ids, no text"


class VLLMSampling(RequestPart):
    """`sampling_params`, with vLLM's defaults."""

    n: int = Field(1, ge=1, le=128)
    """Choices; choice i samples with `seed + i`."""
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    """0 and -1 keep all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = Field(None, ge=0, le=64)
    """Report the logprob of each token, and of this many most likely ones."""
    prompt_logprobs: int | None = Field(None, ge=0, le=64)
    """Likewise of the prompt's tokens."""
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    """Not used, nor the next two: answers hold token ids, no text."""
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    include_stop_str_in_output: Annotated[JsonValue, unsupported(IN_THE_TEXT, False)] = None
    bad_words: Annotated[JsonValue, unsupported("send logit_bias", [])] = None
    allowed_token_ids: Annotated[JsonValue, unsupported("send logit_bias")] = None
    truncate_prompt_tokens: Annotated[JsonValue, unsupported("send the tokens you want")] = None
    output_kind: Annotated[JsonValue, unsupported("streams send what is new", 0, 1, 2)] = None
    flat_logprobs: Annotated[JsonValue, unsupported("logprobs have one form", False)] = None
    extra_args: Annotated[JsonValue, unsupported("logits are not changed by clients", {})] = None

    def given(self, index: int) -> dict[str, Any]:
        """Parameters of one choice by our names."""
        grammar = self.structured_outputs
        return {
            "max_new_tokens": self.max_tokens,
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k > 0 else None,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "logit_bias": self.logit_bias,
            "seed": None if self.seed is None else (self.seed + index) % 2**63,
            "json_schema": grammar and grammar.json_,
            "regex": grammar and grammar.regex,
        }


class TokensBody(RequestPart):
    """`POST /inference/v1/generate`: token ids in and out."""

    request_id: Identifier = Field(default_factory=lambda: uuid.uuid4().hex)
    model: str | None = None
    """The served model, or an adapter of it; None takes the base."""
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    sampling_params: VLLMSampling = VLLMSampling()
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Not used: no prefix outlives its weights, and all clients may share those that serve."""
    weight_version: VersionWanted | None = None
    """Extension: the version that has to serve; 409 with Retry-After while it does not."""

    priority: Annotated[JsonValue, unsupported("requests are served as they come", 0)] = None
    features: Annotated[JsonValue, unsupported("a model of text alone")] = None
    kv_transfer_params: Annotated[JsonValue, unsupported("caches stay where they are")] = None


NO_TRANSFER = (
    "weights come here from a directory, by POST /update_weights (weight_dir) or /collective_rpc "
    "(reload_weights with a weights_path); by SGLang's routes; or from a publisher of ours"
)


class AbortRequestsBody(RequestPart):
    """`POST /abort_requests`."""

    request_ids: tuple[str, ...] = ()
    """None of them ends all requests."""


class ReloadArguments(RequestPart):
    weights_path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    is_checkpoint_format: Annotated[
        JsonValue, unsupported("a directory holds a checkpoint", True)
    ] = None


class CollectiveCallBody(RequestPart):
    """`POST /collective_rpc`: `reload_weights` alone, since others call into vLLM's own processes."""

    method: str
    kwargs: ReloadArguments | None = None
    args: Annotated[JsonValue, unsupported("send kwargs", [])] = None
    timeout: float | None = None
    """Not used: `weights.stage_timeout_s` of a server, or `fleet.update_timeout_s`, bounds it."""


class TransferBody(RequestPart):
    """`POST /update_weights`, with a directory, as prime-rl's servers take it."""

    weight_dir: str | None = Field(None, min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    update_info: JsonValue = None
    """vLLM's own: refused."""


def path_to_reload(body: CollectiveCallBody | TransferBody) -> str:
    """Return the directory that is to be published.

    Raises:
        InvalidField: something else is called, or weights are to come by another way.
    """
    if isinstance(body, TransferBody):
        if body.weight_dir is None or body.update_info is not None:
            raise InvalidField(NO_TRANSFER, "weight_dir")
        return body.weight_dir
    if body.method != "reload_weights" or body.kwargs is None:
        raise InvalidField(
            f"method {body.method!r} calls into vLLM's own processes; here it is reload_weights, with "
            "weights_path in kwargs",
            "method",
        )
    return body.kwargs.weights_path


class AdapterBody(RequestPart):
    """`POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter`."""

    lora_name: Identifier
    lora_path: str | None = Field(None, min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    load_inplace: bool | None = None
    """Not used: a name that is loaded already takes the next version."""
    lora_int_id: int | None = None
    """Not used: names alone address an adapter."""
    base_model_name: str | None = None
    """Not used."""
