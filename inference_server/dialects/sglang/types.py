"""Requests of SGLang's clients that change one server's weights or adapters, or read them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.dialects.sglang.types import SelectingBody, SGLangBody


class ParameterBody(SGLangBody):
    """`POST /get_weights_by_name`."""

    name: str
    truncate_size: int = Field(100, ge=0)
    """Rows to report, at most."""


class CheckerBody(SelectingBody):
    """`POST /weights_checker`."""

    action: Literal["checksum"]
