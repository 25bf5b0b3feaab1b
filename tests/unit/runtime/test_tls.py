"""Encrypted transport between our own processes, with an authority of the test's own."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from headway.contracts.config.gateway import ServiceConfig, TLSConfig
from headway.contracts.errors import ConfigError
from headway.runtime.tls import CLIENT_CERT, CLIENT_KEY, client_context, server_options
from tests.unit.runtime.served import served

CALLS = """
import asyncio, sys
from headway.contracts.types import LLMRequest
from headway.runtime.inference_client import RemoteInferenceEngine
url = sys.argv[1]
client = RemoteInferenceEngine(url, connect_timeout_s=0.2)

def told(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

async def generate():
    try:
        return await client.agenerate(LLMRequest(rid="r", input_ids=(1,)))
    finally:
        await client.aclose()

print(told(client.status))
print(told(lambda: asyncio.run(generate())))
client.destroy()
"""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> TLSConfig:
    server = authority.issue_cert("127.0.0.1", "localhost")
    server.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in server.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert.pem", append=True)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    client = authority.issue_cert("trainer")
    client.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    return TLSConfig(cert_file=str(tmp_path / "cert.pem"), key_file=str(tmp_path / "key.pem"))


def calls(port: int, env: dict[str, str]) -> list[str]:
    """What the client of the control plane and that of the data plane meet, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, f"https://localhost:{port}"],
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_clients_believe_whom_the_environment_names(files: TLSConfig, tmp_path: Path):
    with served(ServiceConfig(tls=files)) as port:
        trusted = calls(port, {"SSL_CERT_FILE": str(tmp_path / "ca.pem")})
        strangers = calls(port, {})
    assert len(trusted) == 2
    assert all("is not served here" in line for line in trusted), trusted
    assert all("CERTIFICATE_VERIFY_FAILED" in line for line in strangers), strangers


def test_a_server_may_ask_for_a_certificate(files: TLSConfig, tmp_path: Path):
    asking = files.model_copy(update={"client_ca_file": str(tmp_path / "ca.pem")})
    trust = {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    with served(ServiceConfig(tls=asking)) as port:
        known = calls(port, {**trust, CLIENT_CERT: str(tmp_path / "client.pem")})
        unknown = calls(port, trust)
    assert all("is not served here" in line for line in known), known
    assert not any("is not served here" in line for line in unknown), unknown
    assert all(line.startswith("BackendError") for line in unknown), unknown


async def test_old_protocols_and_plain_text_are_refused(files: TLSConfig):
    with served(ServiceConfig(tls=files)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=old)


@pytest.mark.parametrize("broken", ["cert_file", "key_file", "client_ca_file"])
def test_a_file_that_cannot_be_used_is_named_before_the_port_is_taken(
    files: TLSConfig, tmp_path: Path, broken: str
):
    for content in (None, "no certificate"):
        file = tmp_path / "broken.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError, match=r"service\.tls.*broken\.pem"):
            server_options(files.model_copy(update={broken: str(file)}))


@pytest.fixture
def fresh() -> Iterator[None]:
    client_context.cache_clear()
    yield
    client_context.cache_clear()


def test_a_client_certificate_that_cannot_be_used_is_named(fresh, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(CLIENT_CERT, str(tmp_path / "none.pem"))
    monkeypatch.delenv(CLIENT_KEY, raising=False)
    with pytest.raises(ConfigError, match=CLIENT_CERT):
        client_context()
