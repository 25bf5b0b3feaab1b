"""Requests of SGLang's clients, field by field: honoured, or refused by name.

Top-level keys that we do not know are refused only if they ask for something: clients of SGLang send
many of its keys at their defaults (`"image_data": null`, `"return_hidden_states": false`). Inside of
`sampling_params` every unknown key is refused, as SGLang does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from headway.contracts.config.base import Config, Identifier
from headway.contracts.http.generation import PauseMode
from headway.contracts.http.weights import WeightPath
from headway.contracts.types import TokenId
from headway.dialects.structured_output import JsonSchema
from headway.dialects.unsupported import RequestPart, unsupported
from headway.dialects.version_wanted import VersionWanted

AS_LOADED = "weights serve as they were loaded, without quantization; leave it out"
SAYS_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


class SGLangBody(RequestPart):
    """A request body."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _refuse_what_we_do_not_know(self) -> SGLangBody:
        asked = [
            key for key, value in (self.model_extra or {}).items() if value not in SAYS_NOTHING
        ]
        if asked:
            raise ValueError(f"{', '.join(sorted(asked))}: not supported here; leave it out")
        return self


class SGLangSampling(Config):
    """`sampling_params`."""

    max_new_tokens: int | None = 128
    """None allows as many tokens as fit into the context."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    """Sample i of n takes this + i: n equal samples are of no use."""
    n: int = Field(1, ge=1, le=1024)
    """Samples of each prompt."""
    skip_special_tokens: bool = True
    """Leave special tokens out of `text`; `output_ids` has them all."""
    spaces_between_special_tokens: bool = True
    """Without effect on fast tokenizers, which ours are."""
    no_stop_trim: bool = False
    """Leave what ended the sequence in `text`."""
    stream_interval: int | None = Field(None, ge=1)
    """Tokens per chunk of a stream; None leaves it to the server."""
    json_schema: JsonSchema | None = None
    """The output is JSON of this schema."""
    regex: str | None = None
    """The whole output matches it."""
    stop_regex: None = None
    ebnf: None = None
    structural_tag: None = None
    custom_params: Annotated[
        JsonValue, unsupported("logits are not changed by clients; leave it out")
    ] = None


def _as_list(given: Any) -> Any:
    return [given or {}] if given is None or isinstance(given, dict) else given


class GenerateBody(SGLangBody):
    """`POST /generate`: one prompt, or a list of them; per-prompt fields take a list then."""

    text: str | tuple[str, ...] | None = None
    input_ids: tuple[TokenId, ...] | tuple[tuple[TokenId, ...], ...] | None = None
    sampling_params: Annotated[tuple[SGLangSampling, ...], BeforeValidator(_as_list)] = (
        SGLangSampling(),
    )
    rid: str | tuple[str, ...] | None = None
    return_logprob: bool | tuple[bool, ...] | None = False
    logprob_start_len: int | tuple[int, ...] | None = -1
    """Report the logprobs of the prompt from here on; -1 reports none."""
    top_logprobs_num: int | tuple[int, ...] | None = 0
    return_text_in_logprobs: bool = False
    lora_path: str | tuple[str | None, ...] | None = None
    """Name of a loaded adapter; None takes the base alone."""
    weight_version: VersionWanted | None = None
    """The version that has to serve; 409 with Retry-After while it does not."""
    stream: bool = False
    log_metrics: Literal[True] = True
    """Every request is counted."""


class AbortBody(SGLangBody):
    """`POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(SGLangBody):
    """`POST /pause_generation`."""

    mode: PauseMode = "abort"


class EmptyBody(SGLangBody):
    """A body that has to be there: `{}`."""


class UpdateBody(SGLangBody):
    """Fields that all updates of weights share."""

    weight_version: str | None = Field(None, min_length=1, max_length=256)
    """Name of the new weights; None leaves the naming to the server."""
    abort_all_requests: bool = False
    """End what runs with the tokens so far; false leaves it to the server's `update_policy`."""
    flush_cache: bool = True
    """Drop shared prefixes after the update."""


class DiskUpdateBody(UpdateBody):
    """`POST /update_weights_from_disk`."""

    model_path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    load_format: Literal["auto", "safetensors"] | None = None


class SelectingBody(SGLangBody):
    """A body that may say which weights it is about."""

    selector: Annotated[
        JsonValue, unsupported("a server has one model; send all, or leave it out", "all")
    ] = None


class JoinGroupBody(SGLangBody):
    """`POST /init_weights_update_group`."""

    master_address: str = Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9._:\[\]-]+$")
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=0)
    """Our rank: this server is one process."""
    world_size: int = Field(ge=1)
    group_name: str = Field("weight_update_group", min_length=1, max_length=256)
    backend: Literal["gloo", "nccl"] = "nccl"


class LeaveGroupBody(SGLangBody):
    """`POST /destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class GroupUpdateBody(UpdateBody, SelectingBody):
    """`POST /update_weights_from_distributed`: one bucket, to be broadcast in this order."""

    names: tuple[str, ...] = Field(min_length=1)
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    group_name: str = "weight_update_group"
    load_format: Literal["flattened_bucket"] | None = None

    @property
    def is_flat(self) -> bool:
        """True if all tensors come as one array of bytes."""
        return self.load_format is not None

    @model_validator(mode="after")
    def _check(self) -> GroupUpdateBody:
        counts = len(self.names), len(self.dtypes), len(self.shapes)
        if len(set(counts)) > 1:
            raise ValueError(
                "{} names, {} dtypes, {} shapes; give one of each per tensor".format(*counts)
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError("names holds one name twice; send each tensor once per bucket")
        return self


class PostProcessBody(SGLangBody):
    """`POST /post_process_weights`: steps around an update that weights of quantized models need."""

    restore_weights_before_load: Annotated[JsonValue, unsupported(AS_LOADED, False)] = None
    post_process_quantization: Annotated[JsonValue, unsupported(AS_LOADED, False)] = None
    post_load_weights: Annotated[JsonValue, unsupported(AS_LOADED, False)] = None


class PullBody(SGLangBody):
    """`POST /pull_weights`."""

    local_checkpoint_dir: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    source_dir: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    """Directory of `weight_v000001` and so on."""
    target_version: int = Field(ge=0, le=999_999)
    """0 is what served at the start."""


class RelabelBody(SGLangBody):
    """`POST /update_weight_version`."""

    new_version: str = Field(min_length=1, max_length=256)
    abort_all_requests: bool = True


class TokenizeBody(SGLangBody):
    """`POST /tokenize`."""

    prompt: str | tuple[str, ...]
    add_special_tokens: bool = True


class DetokenizeBody(SGLangBody):
    """`POST /detokenize`."""

    tokens: tuple[TokenId, ...] | tuple[tuple[TokenId, ...], ...]
    skip_special_tokens: bool = True


class LoadAdapterBody(SGLangBody):
    """`POST /load_lora_adapter`."""

    lora_name: Identifier
    lora_path: WeightPath
    pinned: bool = False
    """Not used: adapters stay until they are unloaded."""


class UnloadAdapterBody(SGLangBody):
    """`POST /unload_lora_adapter`."""

    lora_name: Identifier
