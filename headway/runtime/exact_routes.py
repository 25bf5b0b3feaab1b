"""Routes by method and path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send


class ExactRoutes(BaseRoute):
    """Finds an app's routes whose paths have no parameters in one look.

    FastAPI tries one after another, and those of an included router twice: with 150 routes that takes
    100 us, most of a small request's time. To be the first route of an app; the others are added before
    its first request, without a prefix or dependencies of a router.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._all = routes

    @cached_property
    def _exact(self) -> dict[tuple[str, str], Route]:
        found: dict[tuple[str, str], Route] = {}
        for route in _each(self._all):
            for method in () if route.param_convertors else route.methods or ():
                found.setdefault((method, route.path), route)
        return found

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """A full match, or none: not even that a path takes other methods."""
        key = (scope.get("method", ""), scope["path"].removeprefix(scope.get("root_path", "")))
        route = self._exact.get(key)
        if route is None:
            return Match.NONE, {}
        return Match.FULL, {"endpoint": route.endpoint, "path_params": {}, "route": route}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that matched."""
        await scope["route"].handle(scope, receive, send)


def _each(routes: Sequence[BaseRoute]) -> Iterator[Route]:
    """Routes, and those of included routers."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        yield from _each(getattr(getattr(route, "original_router", None), "routes", ()))
