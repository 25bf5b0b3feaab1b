"""A Deployment by Kubernetes' API."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from headway.contracts.errors import BackendError, ConfigError, NotFound

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's token, its namespace, and the cluster's certificate."""
TIMEOUT_S = 10.0


class Deployment:
    """The number of pods of a Deployment."""

    def __init__(self, client: httpx.Client, namespace: str, name: str, token: Path | None) -> None:
        """
        Args:
            token: file with the bearer token, which Kubernetes changes every hour; None sends none.
        """
        self._client = client
        self._path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        self._token = token
        self.name = f"{namespace}/{name}"

    def replicas(self) -> int:
        """Return how many pods it is to have.

        Raises:
            NotFound: there is no such Deployment.
            BackendError: the API does not answer, or does not let us.
        """
        return self._size(self._call("GET", None))

    def resize(self, replicas: int) -> None:
        """Set how many pods it is to have.

        Raises:
            NotFound, BackendError: as `replicas`.
        """
        self._call("PATCH", {"spec": {"replicas": replicas}})

    def _call(self, method: str, body: dict[str, Any] | None) -> Any:
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/merge-patch+json"
        try:
            if self._token is not None:
                headers["authorization"] = f"Bearer {self._token.read_text().strip()}"
            answer = self._client.request(method, self._path, json=body, headers=headers)
            state = answer.json()
        except (httpx.HTTPError, ValueError, OSError) as error:
            raise BackendError(f"Kubernetes gave no answer: {error!r}") from error
        if answer.status_code == 404:
            raise NotFound(f"there is no Deployment {self.name}")
        if not answer.is_success:
            why = state.get("message") if isinstance(state, dict) else None
            message = f"Kubernetes answered {answer.status_code} to {method} {self._path}: {why}"
            if answer.status_code in (401, 403):
                message += "; the service account needs a Role to get and patch deployments/scale"
            raise BackendError(message)
        return state

    def _size(self, state: Any) -> int:
        try:
            # Kubernetes leaves out a 0.
            return int(state["spec"].get("replicas", 0))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BackendError(
                f"Kubernetes gave no scale of {self.name}: {state!r:.200}"
            ) from error


@contextmanager
def find_deployment(name: str, namespace: str | None, api: str | None) -> Iterator[Deployment]:
    """Yield a Deployment of this pod's cluster, or of the one behind an address that asks for no token.

    Raises:
        ConfigError: this is no pod, or its namespace is not known.
    """
    token = ACCOUNT / "token" if api is None else None
    verify: ssl.SSLContext | bool = True
    if api is None:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{word}") for word in ("HOST", "PORT"))
        if not host or not port or not ACCOUNT.is_dir():
            raise ConfigError(
                "this is no pod with a service account; give --api http://127.0.0.1:8001 and "
                "--namespace, beside `kubectl proxy`"
            )
        api = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        verify = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        namespace = namespace or (ACCOUNT / "namespace").read_text().strip()
    if not namespace:
        raise ConfigError(f"give --namespace, in which {name} is")
    with httpx.Client(base_url=api, verify=verify, timeout=TIMEOUT_S, trust_env=False) as client:
        yield Deployment(client, namespace, name, token)
