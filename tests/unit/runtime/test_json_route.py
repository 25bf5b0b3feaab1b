"""Bodies of routes: those that FastAPI calls, and those that are called without it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import pytest
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field

from headway.runtime.http_service import create_service
from headway.runtime.json_route import MODEL_BYTES, JsonRoute, _num_given
from tests.unit.runtime.served import no_lifespan

DIRECT, THROUGH_FASTAPI = "/direct", "/through"


class Numbers(BaseModel):
    numbers: tuple[Annotated[int, Field(ge=0)], ...]


async def direct(body: Numbers, request: Request) -> Response:
    return Response(f"{request.url.path} {sum(body.numbers)}")


async def with_a_dependency(
    body: Numbers, request: Annotated[Request, Depends(lambda: None)]
) -> Response:
    return Response(f"{THROUGH_FASTAPI} {sum(body.numbers)}")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    router = APIRouter(route_class=JsonRoute)
    router.post(DIRECT)(direct)
    router.post(THROUGH_FASTAPI)(with_a_dependency)
    app = create_service("test", no_lifespan, 1 << 22)
    app.include_router(router)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


JSON = "application/json"
MANY = MODEL_BYTES // 2
BODIES = {
    "good": (b'{"numbers": [1, 2]}', JSON),
    "good, charset": (b'{"numbers": [1, 2]}', JSON + "; charset=utf-8"),
    "other JSON": (b'{"numbers": [1, 2]}', "application/problem+json"),
    "large": (json.dumps({"numbers": [1] * MANY}).encode(), JSON),
    "no JSON": (b'{"numbers": [1, 2', JSON),
    "not a number": (b'{"numbers": [NaN]}', JSON),
    "does not fit": (b'{"numbers": [1, -2, "x"]}', JSON),
    "large, does not fit": (json.dumps({"numbers": [-1] + [1] * MANY}).encode(), JSON),
    "empty": (b"", JSON),
    "null": (b"null", JSON),
    "a text": (b'{"numbers": [1, 2]}', "text/plain"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_both_ways_answer_alike(client: httpx.AsyncClient, name: str):
    content, kind = BODIES[name]
    headers = {"content-type": kind, "x-request-id": "r"}
    answers = [
        await client.post(path, content=content, headers=headers)
        for path in (DIRECT, THROUGH_FASTAPI)
    ]
    assert answers[0].status_code == answers[1].status_code
    assert answers[0].text.removeprefix(DIRECT) == answers[1].text.removeprefix(THROUGH_FASTAPI)
    assert answers[0].is_success == ("good" in name or name in ("other JSON", "large"))


async def body_alone(body: Numbers) -> Response:
    return Response()


async def with_a_default(body: Numbers, request: Request = None) -> Response:  # type: ignore[assignment]
    return Response()


async def with_a_number(body: Numbers, request: Request, timeout: float) -> Response:
    return Response()


async def with_a_record(body: Numbers, request: Request) -> Numbers:
    return body


def not_asynchronous(body: Numbers) -> Response:
    return Response()


def test_only_functions_of_a_body_and_its_request_are_called_without_fastapi():
    assert [_num_given(each, Numbers) for each in (body_alone, direct)] == [1, 2]
    others = (with_a_default, with_a_number, with_a_record, not_asynchronous, with_a_dependency)
    assert not any(_num_given(each, Numbers) for each in others)
