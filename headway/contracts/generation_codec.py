"""A generation <-> bytes: safetensors columns, and everything else as JSON in their metadata.

For responses with much in them: a number takes its own size, and no parser reads it. Columns are
`output_tokens` int32 [T] and `output_logprobs` float64 [T]; with a sampling mask, `mask_counts` int32 [T]
and `mask_tokens` int32; with routed experts, `experts` uint8 or uint16 [n, layers, experts], where all
bits set stand for an unknown one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.numpy import load, save

from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMResponse

MEDIA_TYPE = "application/vnd.headway.generation+safetensors"
MANY_VALUES = 4096
"""With more, this takes less time than JSON."""
_FIELDS = "response"
_COLUMNS = {"output_tokens", "output_logprobs", "sampling_mask", "routed_experts"}


def num_values(response: LLMResponse) -> int:
    """Return the number of values in its columns."""
    mask, experts = response.sampling_mask, response.routed_experts
    in_extras = (0 if mask is None else len(mask.tokens)) + (
        0 if experts is None else experts.experts.size
    )
    return len(response.output_tokens) + in_extras


def encode_response(response: LLMResponse) -> bytes:
    """Encode a response; `decode_response` is the inverse, bit for bit."""
    columns: dict[str, NDArray[Any]] = {
        "output_tokens": np.array(response.output_tokens, np.int32),
        "output_logprobs": np.array(response.output_logprobs, np.float64),
    }
    if (mask := response.sampling_mask) is not None:
        columns["mask_counts"] = mask.counts.astype(np.int32, copy=False)
        columns["mask_tokens"] = mask.tokens.astype(np.int32, copy=False)
    if (experts := response.routed_experts) is not None:
        columns["experts"] = experts.narrow()
    content: bytes = save(columns, {_FIELDS: response.model_dump_json(exclude=_COLUMNS)})
    return content


def decode_response(content: bytes) -> LLMResponse:
    """Decode what `encode_response` wrote.

    Raises:
        ValueError: it is no such response.
    """
    try:
        columns = load(content)
        fields = from_json(_metadata(content)[_FIELDS])
        fields["output_tokens"] = _column(columns, "output_tokens", "int32").tolist()
        fields["output_logprobs"] = _column(columns, "output_logprobs", "float64").tolist()
        if "mask_counts" in columns:
            fields["sampling_mask"] = SamplingMask(
                _column(columns, "mask_counts", "int32"), _column(columns, "mask_tokens", "int32")
            )
        if "experts" in columns:
            fields["routed_experts"] = _experts(columns["experts"])
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{len(content)} bytes are no generation: {error!r}") from error
    return LLMResponse.model_validate(fields, extra="ignore")


def _metadata(content: bytes) -> dict[str, str]:
    size = int.from_bytes(content[:8], "little")
    return dict(from_json(content[8 : 8 + size])["__metadata__"])


def _column(columns: dict[str, NDArray[Any]], name: str, dtype: str) -> NDArray[Any]:
    column = columns[name]
    if column.dtype != dtype or column.ndim != 1:
        raise ValueError(f"column {name!r} is {column.dtype}{list(column.shape)}, not {dtype}[n]")
    return column


def _experts(ids: NDArray[Any]) -> RoutedExperts:
    if ids.ndim != 3 or 0 in ids.shape[1:] or ids.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"column 'experts' is {ids.dtype}{list(ids.shape)}, not uint8 or uint16 "
            "[tokens, layers, experts]"
        )
    return RoutedExperts.widen(ids)
