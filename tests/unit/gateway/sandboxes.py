"""Sandboxes for tests, and what it takes to have one here."""

import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.components.shared_services import (
    NoOutbound,
    Program,
    ProgramResult,
    SharedServices,
)
from gateway.sandbox.backends import BUBBLEWRAP, LANDLOCK, Backend, Unavailable
from gateway.sandbox.pool import SandboxPool
from gateway.sandbox.probe import probe
from headway.contracts.errors import BackendError

BACKENDS = {"bubblewrap": BUBBLEWRAP, "landlock": LANDLOCK}


@asynccontextmanager
async def open_pool(
    backend: Backend, num_workers: int = 1, wall_factor: float = 10.0
) -> AsyncIterator[SandboxPool]:
    """A pool that passed the probe; the test is skipped where there can be none."""
    pool = SandboxPool(backend, num_workers, wall_factor)
    try:
        await pool.start()
        await probe(pool)
    except Unavailable as reason:
        await pool.aclose()
        pytest.skip(f"no {backend.name} here: {reason}")
    try:
        yield pool
    finally:
        await pool.aclose()


async def run(pool: SandboxPool, source: str, *calls: str, **fields: Any) -> ProgramResult:
    """Run a program that is written with indentation."""
    return await pool.run(Program(textwrap.dedent(source), calls=calls, **fields))


def services_of(pool: SandboxPool) -> SharedServices:
    """A sandbox, and nothing to call."""
    return SharedServices(pool, NoOutbound())


class HttpOutbound:
    """Calls whatever it is asked to."""

    async def post(self, url: str, body: Any, timeout_s: float) -> Any:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
            try:
                response = await client.post(url, json=body)
                response.raise_for_status()
                return response.json()
            except (httpx.HTTPError, ValueError) as error:
                raise BackendError(str(error)) from error
