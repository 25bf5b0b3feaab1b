"""A gateway and a generation server that ask for tokens: real processes, a fake backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headway.contracts.config.base import Config
from headway.contracts.config.gateway import ROLES, Role, TokenConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.http.paths import STATUS
from headway.launch.launchers.local import LocalRun
from headway.runtime.secret import authorization
from tests.integration.conftest import run_config
from tests.processes import local_run
from tests.waiting import eventually

GATEWAY, SERVER = "gateway", "server"
KINDS = (GATEWAY, SERVER)
MAX_BODY_BYTES = 1 << 20
SECRETS: dict[Role, str] = {role: f"the-secret-for-{role}" for role in ROLES}
VARIABLES: dict[Role, str] = {role: f"HEADWAY_TEST_{role.upper()}" for role in ROLES}
TOKENS = tuple(
    TokenConfig(name=f"of-{role}", env=VARIABLES[role], roles=(role,), consumers=("default",))
    for role in ROLES
)


@dataclass
class Guarded:
    """Both services, and a client of them."""

    run: LocalRun
    urls: dict[str, str]
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30.0))

    def ask(
        self, kind: str, method: str, path: str, role: Role | None = "admin", **options: object
    ) -> httpx.Response:
        """One request, with the token of a role."""
        headers = {**authorization(role and SECRETS[role]), **options.pop("headers", {})}  # type: ignore[dict-item]
        return self.http.request(method, self.urls[kind] + path, headers=headers, **options)  # type: ignore[arg-type]

    def pid(self, kind: str) -> int:
        return self.run.process("server-0" if kind == SERVER else kind).pid

    def is_alive(self) -> bool:
        return all(
            self.run.process(name).exit_code() is None for name in ("gateway", "server-0")
        ) and all(self.ask(kind, "GET", STATUS).status_code == 200 for kind in KINDS)

    def log(self, kind: str) -> str:
        return self.run.process("server-0" if kind == SERVER else kind).spec.log.read_text()


@contextmanager
def guarded_run(folder: Path, model_dir: Path, allow: tuple[str, ...] = ()) -> Iterator[Guarded]:
    """Started, with the server registered at the gateway."""
    os.environ.update({VARIABLES[role]: SECRETS[role] for role in ROLES})
    try:
        config = run_config(folder, model_dir)
        guards = {"tokens": TOKENS, "max_body_bytes": MAX_BODY_BYTES, "header_timeout_s": 2.0}
        gateway = _updated(config.gateway, service=_updated(config.gateway.service, **guards))
        server = _updated(
            config.server,
            service=_updated(config.server.service, **guards),
            backend=FakeBackendConfig(max_context=2048),
            weights=_updated(config.server.weights, allow=allow),
        )
        with local_run(_updated(config, gateway=gateway, server=server)) as run:
            run.start_gateway()
            run.start_servers()
            urls = {GATEWAY: run.url, SERVER: run.process("server-0").wait_ready(30)}
            guarded = Guarded(run, urls)
            with guarded.http:
                eventually(lambda: _is_joined(guarded), 30, "the server is registered")
                yield guarded
    finally:
        for variable in VARIABLES.values():
            os.environ.pop(variable)


def _is_joined(guarded: Guarded) -> bool:
    servers = guarded.ask(GATEWAY, "GET", STATUS).json()["servers"]
    return [server["state"] for server in servers] == ["ready"]


def _updated(config: Config, **fields: object) -> Any:
    return config.model_copy(update=fields)
