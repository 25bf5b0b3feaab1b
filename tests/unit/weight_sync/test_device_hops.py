"""How often, as what, and with how many bytes weights cross between a device and the host.

Figures are of a device that is not there (`tests.device_double`): what a GPU would be asked for.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.numeric.models import save_model
from tests.unit.weight_sync.doubled import (
    Figures,
    behind,
    broadcast,
    model,
    num_buckets,
    on_double,
    quantized,
    receive,
    retired,
    rooms,
    share_parameters,
    store,
)

BYTES = sum(tensor.numel() * 2 for tensor in model().values())
"""Of the version, in bfloat16."""
OUT = "device to host"


def test_an_upload_crosses_to_the_host_once_a_bucket_and_in_the_published_type(
    tmp_path: Path,
) -> None:
    found = on_double(store, str(tmp_path))
    assert found["equal"]
    assert found["transfers"] == {(OUT, "torch.uint8"): (num_buckets(torch.bfloat16), BYTES)}
    assert (found["syncs"], found["mixed"]) == (num_buckets(torch.bfloat16), [])


@pytest.fixture(scope="module")
def sent() -> Figures:
    return on_double(broadcast)


def test_a_broadcast_leaves_from_the_device_and_only_sums_are_read_before_it(
    sent: Figures,
) -> None:
    found, count = copy.deepcopy(sent), num_buckets(torch.bfloat16)
    copies, read = found["packed"]["transfers"].pop((OUT, "torch.uint8"))
    sums, bytes_of_sums = found["packed"]["transfers"].pop((OUT, "torch.int64"))
    assert (copies, read) == (count, BYTES)  # into pinned memory, which nobody waits for
    assert sums == count
    # 255 tiny tensors have a row each; the large ones cost 16 of 32768 bytes.
    assert bytes_of_sums <= 16 * (len(model()) + BYTES // 32768)
    tables = found["packed"]["transfers"].pop(("host to device", "torch.int64"))
    assert tables[0] == 1  # of the checksum, once per process
    assert not found["packed"]["transfers"]
    assert found["packed"]["mixed"] == []
    assert found["proven"]
    assert sum(size for _, size in found["wire"]) == BYTES
    assert {device for device, _ in found["wire"]} == {"gpu"}


def test_few_buckets_wait_on_the_device_to_be_sent(sent: Figures) -> None:
    assert sent["on_device"] == sent["limit"] < num_buckets(torch.bfloat16)
    late = num_buckets(torch.bfloat16) - sent["limit"]
    assert sent["sent"]["transfers"][("host to device", "torch.uint8")][0] == late


def test_parameters_that_lie_on_the_generators_device_are_lent_and_not_copied() -> None:
    found = on_double(share_parameters)
    assert found == {
        "transfers": {},
        "syncs": 0,
        "mixed": [],
        "own_bytes": 0,
        "devices": {"gpu:0"},
    }


def test_what_came_to_the_device_is_proven_and_served_there(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    found = on_double(receive, str(folder), str(tmp_path / "cache"))
    assert found["equal"]
    assert [found[step]["mixed"] for step in ("proven", "swapped", "laid_out")] == [[], [], []]
    assert found["proven"]["transfers"].keys() == {(OUT, "torch.int64")}  # sums, no weights
    assert found["proven"]["transfers"][OUT, "torch.int64"][0] == found["num_tensors"]
    assert found["swapped"]["transfers"] == {}
    assert found["laid_out"]["transfers"] == {(OUT, "torch.uint8"): (1, found["nbytes"])}


def test_what_goes_out_behind_a_step_crosses_once_in_the_published_type() -> None:
    found = on_double(behind)
    assert found["equal"]
    assert (found["mixed"], found["syncs"]) == ([], 1)
    assert found["transfers"] == {(OUT, "torch.uint8"): (1, BYTES)}


def test_buckets_are_received_on_the_device_while_there_is_room() -> None:
    assert on_double(rooms) == {"raw": "gpu", "packed": "cpu", "host": "cpu", "full": "cpu"}


def test_memory_of_a_device_that_others_may_hold_is_used_again() -> None:
    found = on_double(retired)
    assert found == {"smallest first": True, "then larger": True, "then new": 60}


def test_a_quantized_bucket_crosses_to_the_host_once() -> None:
    found = on_double(quantized)
    assert found["mixed"] == []
    count = num_buckets(torch.float32)
    assert found["transfers"] == {(OUT, "torch.uint8"): (count, 2 * BYTES)}
