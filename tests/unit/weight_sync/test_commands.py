"""`headway weights`: what an operator sees, and what is deleted."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headway.contracts.config.weight_sync import DiskSync, HttpSync, SharedMemorySync
from headway.contracts.errors import ConfigError, SyncError
from headway.launch.cli import main
from weight_sync.adapter import make_adapter
from weight_sync.manifest import Base
from weight_sync.transports.base import make_publisher
from weight_sync.transports.disk import LOCK_NAME

DEADLINE_S = 60.0
MODULE = "layers.0.proj"


def model(*changed: int) -> dict[str, torch.Tensor]:
    """Two tensors; the elements named are one larger."""
    tensors = {
        f"{MODULE}.weight": torch.arange(6000.0).reshape(60, 100).bfloat16(),
        "norm.weight": torch.ones(100),
    }
    for element in changed:
        tensors["norm.weight"][element] += 1
    return tensors


def publish_adapter(publisher, version: int, base) -> None:
    generator = torch.Generator().manual_seed(version)
    tensors = {
        f"{MODULE}.lora_A.weight": torch.randn(2, 100, generator=generator),
        f"{MODULE}.lora_B.weight": torch.randn(60, 2, generator=generator),
    }
    ref = Base(version=base.version, digest=base.digest)
    adapter = make_adapter({"r": 2, "lora_alpha": 2000})
    publisher.publish_adapter(version, tensors.items(), adapter, ref)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """1 full, 2 a delta on it, 3 a delta on that, 4 an adapter on 1."""
    root = tmp_path / "weights"
    publisher = make_publisher(DiskSync(root=str(root), delta={"full_every": 8}))
    first = publisher.publish(1, model().items())
    publisher.publish(2, model(5).items())
    publisher.publish(3, model(5, 6).items())
    publish_adapter(publisher, 4, first)
    publisher.close()
    return root


@pytest.fixture
def call(capsys):
    """Runs a command and gives what it prints, as JSON where that was asked for."""

    def called(*argv: object):
        capsys.readouterr()
        main(["weights", *map(str, argv)])
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in argv else text

    return called


def fail(capsys, *argv: object) -> tuple[str, str]:
    """What a command that fails prints, and its error."""
    capsys.readouterr()
    with pytest.raises((SyncError, ConfigError)) as caught:
        main(["weights", *map(str, argv)])
    return capsys.readouterr().out, caught.value.message


def headway(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway.launch.cli", "weights", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def damage(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def entry_of(root: Path, version: int, name: str) -> dict:
    manifest = json.loads((root / f"v{version:08d}" / "manifest.json").read_text())
    return next(entry for entry in manifest["tensors"] if entry["name"] == name)


def test_versions_are_listed_with_what_they_build_on(root, call):
    rows = call("ls", root, "--json")
    assert [(row["version"], row["kind"], row["base"], row["chain"]) for row in rows] == [
        (1, "full", None, 0),
        (2, "delta", 1, 1),
        (3, "delta", 2, 2),
        (4, "adapter", 1, 1),
    ]
    assert {row["state"] for row in rows} == {"complete"}
    assert [row["parameters"] for row in rows] == [6100, 6100, 6100, 320]
    assert rows[0]["stored_bytes"] == 6000 * 2 + 100 * 4
    assert rows[0]["share_of_full"] == 1.0
    assert 0 < rows[1]["share_of_full"] < 0.05
    assert rows[3]["share_of_full"] == pytest.approx(1280 / 12400)
    table = call("ls", root)
    assert all(row["digest"][:12] in table for row in rows)


def test_a_version_is_seen_while_it_is_written_and_nobody_is_disturbed(tmp_path, call):
    root = tmp_path / "weights"
    publisher = make_publisher(DiskSync(root=str(root), shard_bytes=1 << 20))
    publisher.publish(1, model().items())
    seen: dict[str, list] = {}
    reached, looked = threading.Event(), threading.Event()

    def tensors():
        for index in range(8):
            yield f"w{index}", torch.full((1 << 19,), float(index))
            if index == 6:
                reached.set()
                assert looked.wait(DEADLINE_S)

    writing = threading.Thread(target=lambda: seen.update(meta=publisher.publish(2, tensors())))
    writing.start()
    assert reached.wait(DEADLINE_S)
    try:
        states = [row["state"] for row in call("ls", root, "--json")]
        proven = call("verify", root, "--json")["versions"]
    finally:
        looked.set()
        writing.join(DEADLINE_S)
    assert states == ["complete", "being written"]
    assert [(report["version"], report["state"]) for report in proven] == [
        (1, "verified"),
        (2, "being written"),
    ]
    assert seen["meta"].version == 2
    assert [row["state"] for row in call("ls", root, "--json")] == ["complete", "complete"]
    publisher.close()


def leave_unfinished(root: Path, version: int) -> None:
    """As a publisher that was killed an hour ago."""
    folder = root / f"v{version:08d}"
    folder.mkdir()
    file = folder / "announcement.json"
    file.write_text(json.dumps({"version": version}))
    os.utime(file, (1.7e9, 1.7e9))


def test_what_a_dead_publisher_left_is_unfinished(root, call, capsys):
    leave_unfinished(root, 9)
    assert call("ls", root, "--json")[-1]["state"] == "unfinished"
    assert call("verify", root, "--json")["versions"][-1]["state"] == "unfinished"
    _, message = fail(capsys, "verify", root, 9)
    assert "version 9 (unfinished)" in message


def test_every_version_is_proven_through_its_chain(root, call):
    found = call("verify", root, "--json")
    assert [report["state"] for report in found["versions"]] == ["verified"] * 4
    assert found["gb_per_s"] > 0
    only = call("verify", root, 3, "--json")
    assert [report["version"] for report in only["versions"]] == [3]
    assert only["bytes"] < found["bytes"]
    assert "GB/s" in call("verify", root)


def test_a_damaged_tensor_is_named_with_all_that_builds_on_it(root, capsys):
    entry = entry_of(root, 1, "norm.weight")
    damage(root / "v00000001" / entry["blob"], entry["offset"])
    out, message = fail(capsys, "verify", root)
    assert f"version 1: norm.weight in {entry['blob']} at {entry['offset']}: it has a wrong" in out
    assert "version 2: norm.weight" in out
    assert MODULE not in out
    assert "damaged: versions 1, 2, 3" in message
    _, message = fail(capsys, "verify", root, 3)
    assert "damaged: version 3" in message


def test_a_torn_blob_a_lost_one_and_an_edited_manifest_are_damage(root, capsys):
    adapter = root / "v00000004" / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1])
    out, message = fail(capsys, "verify", root)
    assert "is torn" in out and "damaged: version 4" in message
    adapter.unlink()
    assert "damaged: version 4" in fail(capsys, "verify", root)[1]
    manifest = root / "v00000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("norm.weight", "norm.height"))
    out, message = fail(capsys, "verify", root)
    assert "was changed after it was written" in out
    assert "damaged: versions 1, 2, 3, 4" in message


def test_a_header_that_misleads_engines_is_damage(root, capsys):
    blob = root / "v00000001" / entry_of(root, 1, "norm.weight")["blob"]
    blob.write_bytes(blob.read_bytes().replace(b'"norm.weight"', b'"norm.height"'))
    out, _ = fail(capsys, "verify", root, 1)
    assert "the header and the manifest disagree about norm.height, norm.weight" in out


def test_a_base_that_is_gone_is_damage(root, call, capsys):
    for file in (root / "v00000002").iterdir():
        file.unlink()
    (root / "v00000002").rmdir()
    out, message = fail(capsys, "verify", root)
    assert "its base, version 2" in out and "is not there" in out
    assert "damaged: version 3" in message
    states = {row["version"]: row["state"] for row in call("ls", root, "--json")}
    assert states == {1: "complete", 3: "base missing", 4: "complete"}


def test_changes_are_measured_per_tensor(root, call):
    found = call("diff", root, 1, 3, "--json")
    assert found["num_changed"] == 2
    first, second = found["tensors"]
    assert (first["name"], first["num_changed"], first["max_abs"]) == ("norm.weight", 2, 1.0)
    assert first["relative_l2"] == pytest.approx((2 / 100) ** 0.5)
    assert (second["num_changed"], second["max_abs"], second["relative_l2"]) == (0, 0.0, 0.0)
    assert "1 of 2 tensors changed, in 2 of 6,100 elements" in call("diff", root, 1, 3)


def test_an_adapter_is_compared_as_what_servers_serve(root, call):
    found = call("diff", root, 3, 4, "--json")
    assert [change["name"] for change in found["tensors"]] == [f"{MODULE}.weight", "norm.weight"]
    assert found["tensors"][0]["num_changed"] > 5000
    assert found["tensors"][1]["num_changed"] == 2
    top = call("diff", root, 3, 4, "--top", 1, "--json")
    assert [change["name"] for change in top["tensors"]] == [f"{MODULE}.weight"]
    assert top["num_changed"] == found["num_changed"]


def test_names_that_come_and_go_and_numbers_that_are_none(tmp_path, call, monkeypatch):
    monkeypatch.setattr("weight_sync.publisher.check_finite", lambda *_: None)
    publisher = make_publisher(DiskSync(root=str(tmp_path)))
    zeros, nan = torch.zeros(2), torch.tensor([float("nan"), 1.0])
    publisher.publish(1, {"a": zeros, "b": zeros, "c": zeros, "n": nan}.items())
    publisher.publish(
        2, {"a": zeros + 1, "c": torch.zeros(3), "d": zeros, "n": nan.clone()}.items()
    )
    publisher.close()
    found = call("diff", tmp_path, 1, 2, "--json")
    changes = {change["name"]: change for change in found["tensors"]}
    assert changes["a"]["relative_l2"] is None and changes["a"]["max_abs"] == 1.0
    assert changes["n"]["num_changed"] == 0 and changes["n"]["max_abs"] is None
    assert (list(found["added"]), list(found["gone"]), list(found["reshaped"])) == (
        ["d"],
        ["b"],
        ["c"],
    )
    assert "gone: b float32 [2]" in call("diff", tmp_path, 1, 2)


def test_old_versions_go_but_never_what_a_kept_one_builds_on(root, call):
    planned = call("gc", root, "--keep", 1, "--dry-run", "--json")
    assert [row["version"] for row in planned["deleted"]] == [3, 2]
    assert len(call("ls", root, "--json")) == 4
    done = call("gc", root, "--keep", 1, "--json")
    assert done["kept"] == [1, 4]
    assert done["freed_bytes"] == planned["freed_bytes"] > 0
    assert [row["version"] for row in call("ls", root, "--json")] == [1, 4]
    call("verify", root)


def test_a_pinned_version_stays_with_its_bases(root, call, capsys):
    assert call("gc", root, "--keep", 1, "--keep-version", 2, "--json")["kept"] == [1, 2, 4]
    _, message = fail(capsys, "gc", root, "--keep", 1, "--keep-version", 3)
    assert "no complete version 3" in message


def test_what_was_never_finished_goes_once_no_publisher_is_there(root, call):
    leave_unfinished(root, 9)
    assert "deleted unfinished version 9" in call("gc", root, "--keep", 4)
    assert [row["version"] for row in call("ls", root, "--json")] == [1, 2, 3, 4]


def test_nothing_goes_while_a_publisher_lives(root, call, capsys):
    publisher = make_publisher(DiskSync(root=str(root)))
    _, message = fail(capsys, "gc", root, "--keep", 1)
    assert "has a publisher already" in message and "weight_sync.keep" in message
    assert "would delete version 3" in call("gc", root, "--keep", 1, "--dry-run")
    assert len(call("ls", root, "--json")) == 4
    publisher.close()
    call("gc", root, "--keep", 1)


def test_nothing_goes_if_a_kept_manifest_does_not_say_what_it_needs(root, capsys):
    (root / "v00000004" / "manifest.json").write_text("{}")
    fail(capsys, "gc", root, "--keep", 1)
    assert len(list(root.glob("v*"))) == 4


def test_shared_memory_is_listed_and_freed(tmp_path, call):
    root = f"shm://{tmp_path}"
    publisher = make_publisher(SharedMemorySync(root=str(tmp_path), keep=1))
    for version in (1, 2, 3, 4):
        publisher.publish(version, model(version).items())
    publisher.collect(3)  # keeps blobs to write them again
    assert [report["state"] for report in call("verify", root, "--json")["versions"]] == [
        "verified",
        "verified",
    ]
    assert call("diff", root, 3, 4, "--json")["num_changed"] == 2
    publisher.close()
    freed = call("gc", root, "--keep", 1, "--json")
    assert freed["kept"] == [4]
    assert freed["retired_bytes"] > 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [LOCK_NAME, "v00000004"]


def test_an_object_store_needs_a_word_that_no_publisher_lives(root, call, capsys):
    url = f"file://{root}"
    assert [row["version"] for row in call("ls", url, "--json")] == [1, 2, 3, 4]
    memory = "memory://weights-of-test-commands"
    publisher = make_publisher(DiskSync(root=memory))
    for version in (1, 2):
        publisher.publish(version, model(version).items())
    assert [row["state"] for row in call("ls", memory, "--json")] == ["complete"] * 2
    assert call("verify", memory, "--json")["bytes"] > 0
    _, message = fail(capsys, "gc", memory, "--keep", 1)
    assert "--no-publisher" in message
    assert call("gc", memory, "--keep", 1, "--no-publisher", "--json")["kept"] == [2]
    assert [row["version"] for row in call("ls", memory, "--json")] == [2]


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", "is no directory of versions"),
        ("empty", "holds no versions"),
        ("weights/v00000001", "is one version"),
        ("http://127.0.0.1:1/weights", "cannot be listed"),
        ("gloo://127.0.0.1:1/1", "cannot be listed"),
        ("nothing://bucket", "cannot be opened"),
    ],
)
def test_a_root_that_is_none_is_said_so_and_stays_as_it_is(
    root, command, given, message, tmp_path, capsys
):
    (tmp_path / "empty").mkdir()
    place = given if "://" in given else tmp_path / given
    flags = ["--keep", "1"] if command == "gc" else []
    assert message in fail(capsys, command, place, *flags)[1]
    assert not (tmp_path / "nowhere").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_versions_that_http_serves_are_listed_where_they_lie(tmp_path, call):
    publisher = make_publisher(HttpSync(root=str(tmp_path)))
    publisher.publish(1, model().items())
    assert [row["version"] for row in call("ls", tmp_path, "--json")] == [1]
    publisher.close()


def test_the_command_line_ends_with_what_it_found(root):
    listed = headway("ls", root)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "adapter" in listed.stdout
    assert headway("verify", root).returncode == 0
    entry = entry_of(root, 1, f"{MODULE}.weight")
    damage(root / "v00000001" / entry["blob"], entry["offset"] + 7)
    damaged = headway("verify", root, "--json")
    assert damaged.returncode == 1
    assert json.loads(damaged.stdout)["versions"][0]["damages"][0]["offset"] == entry["offset"]
    assert damaged.stderr.startswith("error [sync]: damaged: versions 1, 2, 3")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "/nowhere/at/all"], "is no directory of versions"),
        (["gc", "/tmp", "--keep", "0"], "0 is not in the range x>=1"),
        (["diff", "/tmp", "1"], "missing argument 'B'"),
    ],
)
def test_bad_arguments_end_with_status_two(argv, message):
    ended = headway(*argv)
    assert ended.returncode == 2
    assert message in ended.stderr
