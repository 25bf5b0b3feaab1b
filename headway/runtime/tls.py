"""Encrypted transport: what a server shows, and whom a client believes.

Clients trust what `SSL_CERT_FILE` or `SSL_CERT_DIR` holds, else the system's authorities. A process that
must show a certificate itself finds it by `HEADWAY_CLIENT_CERT` and `HEADWAY_CLIENT_KEY`: one process,
one identity, whomever it calls.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Any

from headway.contracts.config.gateway import TLSConfig
from headway.contracts.errors import ConfigError

CLIENT_CERT = "HEADWAY_CLIENT_CERT"
CLIENT_KEY = "HEADWAY_CLIENT_KEY"


def server_options(config: TLSConfig | None) -> dict[str, Any]:
    """uvicorn's options.

    Raises:
        ConfigError: a file cannot be read, or does not fit the other.
    """
    if config is None:
        return {}
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        trial.load_cert_chain(config.cert_file, config.key_file)
        if config.client_ca_file is not None:
            trial.load_verify_locations(config.client_ca_file)
    except OSError as error:  # SSLError is one
        raise ConfigError(f"service.tls: {error}; it names {config}") from error
    return {
        "ssl_certfile": config.cert_file,
        "ssl_keyfile": config.key_file,
        "ssl_ca_certs": config.client_ca_file,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if config.client_ca_file else ssl.CERT_NONE,
    }


@cache
def client_context() -> ssl.SSLContext:
    """Return the TLS context of this process's calls to `https` URLs.

    Raises:
        ConfigError: the client certificate that the environment names cannot be read.
    """
    context = ssl.create_default_context()
    if (cert := os.environ.get(CLIENT_CERT)) is not None:
        try:
            context.load_cert_chain(cert, os.environ.get(CLIENT_KEY))
        except OSError as error:
            raise ConfigError(f"{CLIENT_CERT}={cert} cannot be used: {error}") from error
    return context
