"""A service of the user's own as a tool: the model writes the body of a POST."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from gateway.components.shared_services import SharedServices
from headway.contracts.errors import BackendError
from headway.runtime.offload import size_of

MAX_SIZE = 1 << 18
"""Maximum size of an answer that is no text; a text is cut to what the model may read."""


class HttpTool:
    """Calls one URL, which `outbound.allow` must cover, with the model's arguments as JSON.

    The service reports the model's mistakes itself, with status 200; any other status is an outage.
    """

    def __init__(
        self,
        *,
        url: Annotated[str, Field(pattern=r"^https?://\S+$", max_length=2048)],
        function: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")],
        description: Annotated[str, Field(min_length=1, max_length=65_536)],
        parameters: dict[str, Any],
        timeout_s: Annotated[float, Field(gt=0.0)] = 30.0,
    ) -> None:
        """
        Args:
            function: what the model calls it.
            description: what it does, for the model.
            parameters: JSON schema of its arguments, for the model; the service checks them.
        """
        if parameters.get("type") != "object":
            raise ValueError(
                f"parameters are of type {parameters.get('type')!r}; 'object' is wanted"
            )
        self.name = function
        self.description = description
        self.parameters: Mapping[str, Any] = parameters
        self._url = url
        self._timeout_s = timeout_s

    async def call(self, arguments: Mapping[str, Any], services: SharedServices) -> str:
        answer = await services.outbound.post(self._url, dict(arguments), self._timeout_s)
        if isinstance(answer, str):
            return answer
        size = size_of(answer, MAX_SIZE + 1)
        if size > MAX_SIZE:
            raise BackendError(
                f"{self._url} answered with more than {MAX_SIZE} characters and values"
            )
        return json.dumps(answer, ensure_ascii=False)
