"""`GET /v1/weights/held/{version}/{blob}`: the versions that this server gives to its peers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from headway.contracts.http import paths
from headway.runtime.json_route import JsonRoute
from inference_server.peer_store import PeerStore
from weight_sync.manifest import BlobName

CHUNK_BYTES = 1 << 20
BINARY = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")

router = APIRouter(route_class=JsonRoute)


@router.get(paths.WEIGHTS_HELD, response_class=Response)
async def held(version: Annotated[int, Path(ge=0)], blob: BlobName, request: Request) -> Response:
    peer_store: PeerStore = request.app.state.peer_store
    content = await peer_store.read(version, blob)
    if isinstance(content, FilePath):
        return FileResponse(content, media_type=BINARY)
    return _answer(content, request.headers.get("range"))


@dataclass(frozen=True, slots=True)
class _Range:
    start: int
    end: int


def _answer(content: memoryview, asked: str | None) -> Response:
    """All of it, or the range that was asked for; nothing is copied."""
    size = len(content)
    headers = {"Accept-Ranges": "bytes"}
    part = _part_of(asked, size)
    if part is None:
        return _stream(content, 200, headers)
    if part.start >= part.end:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{size}"
    return _stream(content[part.start : part.end], 206, headers)


def _stream(content: memoryview, status: int, headers: dict[str, str]) -> Response:
    headers["Content-Length"] = str(len(content))
    return StreamingResponse(_chunks(content), status, headers, media_type=BINARY)


async def _chunks(content: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]
        await asyncio.sleep(0)  # a fast reader must not delay generation


def _part_of(asked: str | None, size: int) -> _Range | None:
    """The bytes of a single range, none if it cannot be had; None if all are to be sent.

    What is no range in bytes, or several, may be ignored (RFC 9110, 14.2).
    """
    match = _RANGE.fullmatch(asked or "")
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return _Range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return _Range(int(first), min(size, int(last) + 1) if last else size)
