"""Requests of SGLang's clients that change one server's weights or adapters, or read them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from headway.contracts.config.base import Identifier
from headway.contracts.http.weights import WeightPath
from headway.dialects.sglang.types import SGLangBody, UpdateBody
from headway.dialects.unsupported import unsupported

AS_LOADED = "weights serve as they were loaded, without quantization; leave it out"


class LoadAdapterBody(SGLangBody):
    """`POST /load_lora_adapter`."""

    lora_name: Identifier
    lora_path: WeightPath
    pinned: bool = False
    """Not used: adapters stay until they are unloaded."""


class UnloadAdapterBody(SGLangBody):
    """`POST /unload_lora_adapter`."""

    lora_name: Identifier


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


class ParameterBody(SGLangBody):
    """`POST /get_weights_by_name`."""

    name: str
    truncate_size: int = Field(100, ge=0)
    """Rows to report, at most."""


class PostProcessBody(SGLangBody):
    """`POST /post_process_weights`: steps around an update that weights of quantized models need."""

    restore_weights_before_load: Annotated[JsonValue, unsupported(AS_LOADED, False)] = None
    post_process_quantization: Annotated[JsonValue, unsupported(AS_LOADED, False)] = None
    post_load_weights: Annotated[JsonValue, unsupported(AS_LOADED, False)] = None


class CheckerBody(SelectingBody):
    """`POST /weights_checker`."""

    action: Literal["checksum"]
