"""A trainer that only leaves versions in a store, and a gateway that follows it.

The store is a directory, or one that servers reach by a URL alone. Two servers are brought through twenty
versions: differences in both encodings, one whole version, one that is torn until it is mended, and a
server that joins late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from headway.contracts.config.gateway import FollowConfig
from tests.integration.version_fleet import LIMIT_S, PROMPT, Fleet, sampling
from tests.integration.version_model import token_of
from tests.unit.weight_sync.foreign_store import ForeignStore, upload
from tests.waiting import eventually
from weight_sync.tensors import weights_digest

pytestmark = pytest.mark.extended
LAST, TORN, WHOLE, JOINS, OVERWRITES = 20, 7, 10, 12, 14


@pytest.fixture(params=["directory", "objects"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return None if request.param == "directory" else f"local://{tmp_path}/objects/run"


@pytest.fixture
def fleet(url: str | None, tmp_path: Path) -> Iterator[Fleet]:
    follow = FollowConfig(path=url or str(tmp_path / "weights"), interval_s=0.05)
    with closing(Fleet(tmp_path, num_servers=2, follow=follow)) as opened:
        yield opened


def test_a_store_is_followed_through_twenty_versions(fleet: Fleet, url: str | None) -> None:
    store = ForeignStore(fleet.weights, fleet.tensors(0))
    num_servers = 2
    for version in range(1, LAST + 1):
        store.encoding = "overwrite" if version >= OVERWRITES else "xor"
        if version == JOINS:
            fleet.join()
            num_servers += 1
        if version == TORN:
            see_that_it_is_refused(fleet, store, url)
        else:
            brought(store.publish(fleet.tensors(version), is_whole=version == WHOLE), url)
        fleet.until_served(version, num_servers)
        answer = fleet.sglang.generate(input_ids=PROMPT, sampling_params=sampling(3))
        assert answer["output_ids"] == [token_of(version)] * 3
        assert answer["meta_info"]["weight_version"] == str(version)
    wanted = weights_digest(fleet.tensors(LAST))
    for server in fleet.ready():
        checked = httpx.post(f"{server.url}/weights_checker", json={"action": "checksum"}).json()
        assert checked["per_engine_checksum"] == wanted, "bit by bit"


def brought(folder: Path, url: str | None) -> None:
    """Bring a version to where it is followed."""
    if url is not None:
        upload(folder, url)


def see_that_it_is_refused(fleet: Fleet, store: ForeignStore, url: str | None) -> None:
    """The version before it serves on, until it is mended."""
    before = store.version
    whole: dict[Path, bytes] = {}

    def tear(folder: Path) -> None:
        (shard,) = folder.glob("*.safetensors")
        whole[shard] = shard.read_bytes()
        shard.write_bytes(whole[shard][:-50])

    folder = store.publish(fleet.tensors(before + 1), harm=tear)
    brought(folder, url)
    log = fleet.runs[0].process("gateway").spec.log
    assert log is not None

    def is_refused() -> bool:  # the pointer may have been seen half written, too
        lines = log.read_text().splitlines()
        return any("not published" in line and "latest holds" not in line for line in lines)

    eventually(is_refused, LIMIT_S, "it is refused")
    fleet.until_served(before, 2)
    for shard, content in whole.items():
        shard.write_bytes(content)
    brought(folder, url)


def test_a_trainer_pulls_a_version_and_has_it_loaded(tmp_path: Path) -> None:
    """As miles does."""
    with closing(Fleet(tmp_path, num_servers=1)) as fleet:
        store = ForeignStore(fleet.weights, fleet.tensors(0), checksum="adler32")
        local = "/var/tmp/nobody-writes-here"
        for version in (1, 2):
            store.publish(fleet.tensors(version))
            pull = {"local_checkpoint_dir": local, "source_dir": str(fleet.weights)}
            pulled = fleet.sglang.post("/pull_weights", pull | {"target_version": version})
            assert pulled.json()["success"] is True
            loaded = fleet.sglang.update_from_disk(local, weight_version=str(version))
            assert loaded.json()["success"] is True, loaded.text
            answer = fleet.sglang.generate(input_ids=PROMPT, sampling_params=sampling(2))
            assert answer["output_ids"] == [token_of(version)] * 2
