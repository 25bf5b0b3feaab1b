"""One gateway to an SQLite ledger."""

from __future__ import annotations

import pytest

from gateway.ledger.lock import sole_gateway
from headway.contracts.errors import ConfigError


def test_a_second_gateway_is_kept_from_the_file(tmp_path):
    path = str(tmp_path / "folder" / "ledger.sqlite")
    with sole_gateway(path):
        with (
            pytest.raises(ConfigError, match="another gateway has the ledger"),
            sole_gateway(path),
        ):
            pass
        with sole_gateway(str(tmp_path / "other.sqlite")):
            pass
    with sole_gateway(path):
        pass


@pytest.mark.parametrize("name", [":memory:", "redis://127.0.0.1:1/0"])
def test_what_is_no_file_is_not_locked(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with sole_gateway(name), sole_gateway(name):
        pass
    assert not list(tmp_path.iterdir())
