"""A Deployment is brought to the size that a gateway asks for."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from headway.contracts.errors import BackendError, ConfigError, NotFound
from headway.contracts.http.servers import ScaleResponse
from headway.launch import autoscale, kubernetes
from headway.launch.autoscale import follow, look
from headway.launch.kubernetes import Deployment, find_deployment
from tests.kubernetes_api import KubernetesApi, failure, serving


class Wish:
    """A gateway that wants these numbers of servers, one after the other, and ends the loop then."""

    def __init__(self, *wanted: int | BackendError) -> None:
        self._wanted = iter(wanted)

    def scale(self) -> ScaleResponse:
        wanted = next(self._wanted, None)
        if wanted is None:
            raise KeyboardInterrupt
        if isinstance(wanted, BackendError):
            raise wanted
        return ScaleResponse(
            ready=1, wanted=wanted, reason="work", queue_wait_s=None, kv_usage=0.0, headroom=None
        )


@pytest.fixture
def api() -> KubernetesApi:
    return KubernetesApi(2)


@pytest.fixture
def deployment(api: KubernetesApi) -> Iterator[Deployment]:
    with serving(api) as url, find_deployment("headway-server", "rl", url) as found:
        yield found


def test_it_follows_the_wish_within_its_bounds(api: KubernetesApi, deployment: Deployment) -> None:
    with pytest.raises(KeyboardInterrupt):
        follow(Wish(2, 5, 5, 40, 0, 1), deployment, 1, 8, 0.001)
    assert api.sizes == [5, 8, 1]
    assert set(api.tokens) == {None}


def test_none_can_be_wanted(api: KubernetesApi, deployment: Deployment) -> None:
    look(Wish(0), deployment, 0, 8)
    assert (api.sizes, deployment.replicas()) == ([0], 0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((403, failure(403, "Forbidden", "cannot patch")), "cannot patch; .* needs a Role"),
        ((500, failure(500, "InternalError", "etcd")), "answered 500"),
        ((200, {"kind": "Scale"}), "gave no scale of rl/headway-server"),
        ((200, ["a list"]), "gave no scale"),
        ((503, b"<html>"), "gave no answer"),
    ],
)
def test_an_api_that_does_not_do_it_is_named(
    api: KubernetesApi, deployment: Deployment, answer: tuple[int, object], told: str
) -> None:
    api.answer = answer
    with pytest.raises(BackendError, match=told):
        look(Wish(5), deployment, 1, 8)


def test_a_deployment_that_is_not_there_ends_it(api: KubernetesApi) -> None:
    with (
        serving(api) as url,
        find_deployment("another", "rl", url) as found,
        pytest.raises(NotFound, match="no Deployment rl/another"),
    ):
        follow(Wish(5, 5), found, 1, 8, 0.001)


def test_an_outage_is_said_once_and_over_when_it_is_over(
    api: KubernetesApi, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    away = BackendError("the gateway is away")
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyboardInterrupt):
        follow(Wish(away, away, away, 4), deployment, 1, 8, 0.001)
    assert [record.message for record in caplog.records if record.name == autoscale.__name__] == [
        "not scaled",
        "scaled",
    ]
    assert api.sizes == [4]


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that a pod has."""
    for name, text in {"token": "first", "namespace": "rl"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    return tmp_path


def test_a_pod_knows_its_cluster_and_reads_its_token_each_time(
    api: KubernetesApi, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(account / "ca.crt"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with serving(api, context) as url:
        host, port = url.removeprefix("https://").split(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        with find_deployment("headway-server", None, None) as found:
            look(Wish(3), found, 1, 8)
            (account / "token").write_text("second\n")
            assert found.replicas() == 3
            (account / "token").unlink()
            with pytest.raises(BackendError, match="FileNotFoundError"):
                found.replicas()
    assert api.tokens == ["Bearer first", "Bearer first", "Bearer second"]


def test_outside_of_a_pod_it_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="kubectl proxy"), find_deployment("a", None, None):
        pass
    with (
        pytest.raises(ConfigError, match="give --namespace"),
        find_deployment("a", None, "http://127.0.0.1:1"),
    ):
        pass
