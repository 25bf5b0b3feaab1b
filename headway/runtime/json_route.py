"""Routes whose JSON bodies are read by pydantic's parser: a fifth of the time of the standard library's.

It is stricter, too: `NaN` and `Infinity`, which JSON does not have, are refused. Large bodies are
parsed and checked against the route's model beside the event loop. Objects of many members are refused:
each one that is not wanted costs an error of 2 µs.

A function of a body (and the request) that returns a response is called as soon as both are there.
FastAPI looks for dependencies first, which takes a sixth of a small generation's time here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from headway.runtime.large_json import parse_json
from headway.runtime.offload import offload

JSON = "application/json"
MODEL_BYTES = 64 << 10
"""A smaller body is checked against its model on the event loop."""


class JsonRequest(Request):
    """A request that reads its body once, and makes a `model` of a large one."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """The body.

        Raises:
            JSONDecodeError: it is no JSON, nested too deeply, or has objects of too many members.
            RequestValidationError: it is large, and does not fit the model.
        """
        body = await self.body()
        try:
            tree = await parse_json(body)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
        if self._model is None or len(body) <= MODEL_BYTES:
            return tree
        try:
            return await offload(len(body), self._model.model_validate, tree)
        except ValidationError as error:
            found = error.errors(include_url=False)
            raise RequestValidationError(
                [{**each, "loc": ("body", *each["loc"])} for each in found]
            ) from error


class JsonRoute(APIRoute):
    """Route class for `APIRouter(route_class=...)`."""

    def admit(self, request: Request) -> None:
        """Raise what keeps a request out, before its body is read: dependencies are solved after it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = self.body_model()
        num_given = 0 if model is None else _num_given(self.endpoint, model)

        async def handle_json(plain: Request) -> Response:
            self.admit(plain)
            request = JsonRequest(plain.scope, plain.receive, model)
            if num_given and plain.headers.get("content-type") == JSON:
                try:
                    body = model.model_validate(await request.json())  # type: ignore[union-attr]
                except ValueError:  # FastAPI says what is wrong with it
                    pass
                else:
                    response: Response = await self.endpoint(*(body, request)[:num_given])
                    return response
            try:
                return await handle(request)
            except HTTPException as error:  # FastAPI's word for what `json` raised
                if isinstance(error.__cause__, RequestValidationError):
                    raise error.__cause__ from None
                raise

        return handle_json

    def body_model(self) -> type[BaseModel] | None:
        """Return the model that FastAPI makes of the body; it is taken as it is if it was made
        already."""
        if self.body_field is None or self._embed_body_fields:
            return None
        made = self.body_field.field_info.annotation
        return made if isinstance(made, type) and issubclass(made, BaseModel) else None


def _num_given(endpoint: Callable[..., Any], model: type[BaseModel]) -> int:
    """Number of arguments of a function of a body, or a body and its request, that returns a response;
    0: it is another one."""
    signature = inspect.signature(endpoint, eval_str=True)
    fields, returned = signature.parameters.values(), signature.return_annotation
    is_plain = [each.annotation for each in fields] in ([model], [model, Request])
    is_response = isinstance(returned, type) and issubclass(returned, Response)
    has_defaults = any(each.default is not each.empty for each in fields)
    is_direct = is_plain and is_response and not has_defaults
    return len(fields) if is_direct and inspect.iscoroutinefunction(endpoint) else 0
