"""A trainer that broadcasts by SGLang's calls updates a whole fleet through its gateway.

Every token of requests that run meanwhile says which weights sampled it (`version_fleet`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.sglang_client import Trainer
from tests.integration.version_fleet import LIMIT_S, PROMPT, Clients, Fleet, check, sampling
from tests.waiting import eventually

SHORT_RUN = ("test_buckets_under_load_are_one_version_of_all_servers",)
"""What `make test` runs of these."""
TOLD = {"lm_head.weight", "model.norm.weight"}
"""The tensors of a version that its tokens and their logprobs come from."""
Described = dict[str, tuple[str, list[int]]]
Join = Callable[[], Trainer]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with closing(Fleet(tmp_path_factory.mktemp("fleet"), 2)) as opened:
        yield opened


@pytest.fixture
def join(fleet: Fleet) -> Iterator[Join]:
    trainers: list[Trainer] = []

    def joined() -> Trainer:
        trainers.append(Trainer(fleet.name()))
        answer = trainers[-1].join(fleet.sglang)
        assert answer.json()["success"] is True, answer.text
        return trainers[-1]

    yield joined
    for trainer in trainers:
        trainer.kill()


def described(fleet: Fleet, *, told: bool | None = None) -> Described:
    """Names, types and shapes of a version; those that tell the version, the others, or all."""
    tensors = fleet.tensors(0).items()
    return {
        name: ("float32", list(tensor.shape))
        for name, tensor in tensors
        if told is None or (name in TOLD) == told
    }


def serves(fleet: Fleet, version: int, num_servers: int) -> None:
    """Every server has it, and its tokens are of it."""
    versions = {one.version for one in fleet.ready()}
    assert len(fleet.ready()) == num_servers and len(versions) == 1
    body = {"input_ids": PROMPT, "sampling_params": sampling(4), "return_logprob": True}
    for answer in [fleet.sglang.generate(**body) for _ in range(2 * num_servers)]:
        assert check(fleet, answer, 4) == {version}


def next_folder(fleet: Fleet) -> tuple[int, Path]:
    fleet.version += 1
    return fleet.version, fleet.save(fleet.version)


def test_buckets_under_load_are_one_version_of_all_servers(fleet: Fleet, join: Join) -> None:
    trainer, clients = join(), Clients(fleet)
    first, (version, folder) = fleet.version, next_folder(fleet)
    with clients.flowing():
        eventually(lambda: clients.answered > 4, LIMIT_S, "requests are answered")
        kept = trainer.send(fleet.sglang, folder, described(fleet, told=True))
        assert "kept back" in kept.json()["message"]
        seen = clients.answered
        eventually(lambda: clients.answered > seen + 8, LIMIT_S, "it goes on")
        assert clients.seen == {first}, "a part is not served"
        done = trainer.send(
            fleet.sglang, folder, described(fleet, told=False), weight_version=f"step-{version}"
        )
        assert done.json()["message"].endswith(f"Weight version updated to step-{version}.")
        seen = clients.answered
        eventually(lambda: clients.answered > seen + 8, LIMIT_S, "it goes on")
    assert clients.seen == {first, version}
    serves(fleet, version, 2)
    assert fleet.sglang.get("/get_weight_version").json() == {"weight_version": f"step-{version}"}


def test_a_session_of_flattened_buckets_is_served_at_its_end(fleet: Fleet, join: Join) -> None:
    trainer, before = join(), fleet.version
    version, folder = next_folder(fleet)
    assert fleet.sglang.post("/begin_weight_update").json()["success"] is True
    for told in (True, False):
        kept = trainer.send(
            fleet.sglang, folder, described(fleet, told=told), load_format="flattened_bucket",
            weight_version=f"step-{version}",
        )  # fmt: skip
        assert "end_weight_update" in kept.json()["message"]
    serves(fleet, before, 2)
    assert fleet.sglang.post("/end_weight_update").json()["success"] is True
    serves(fleet, version, 2)


def test_a_paused_fleet_serves_a_part_when_it_continues(fleet: Fleet, join: Join) -> None:
    trainer = join()
    version, folder = next_folder(fleet)
    fleet.sglang.pause("retract")
    kept = trainer.send(
        fleet.sglang, folder, described(fleet, told=True), weight_version=f"step-{version}"
    )
    assert "continue_generation" in kept.json()["message"]
    fleet.sglang.resume()
    serves(fleet, version, 2)


def test_a_name_that_comes_late_is_the_update_s(fleet: Fleet, join: Join) -> None:
    trainer = join()
    version, folder = next_folder(fleet)
    trainer.send(fleet.sglang, folder, described(fleet, told=True))
    named = fleet.sglang.post("/update_weight_version", {"new_version": f"step-{version}"})
    assert named.json()["success"] is True
    serves(fleet, version, 2)
    for name in ("step-9999", f"step-{version}"):  # nothing is under way: what serves is renamed
        fleet.sglang.post("/update_weight_version", {"new_version": name})
        assert fleet.sglang.get("/get_weight_version").json() == {"weight_version": name}


def test_a_pin_refuses_what_would_be_published_and_nothing_else(fleet: Fleet, join: Join) -> None:
    trainer, before = join(), fleet.version
    version, folder = next_folder(fleet)
    pin = fleet.sglang.post("/v1/weights/pin", {"version": before})
    assert pin.status_code == 200, pin.text
    whole = described(fleet)
    refused = trainer.send(fleet.sglang, folder, whole, weight_version=f"step-{version}")
    assert refused.status_code == 400 and "is pinned" in refused.json()["message"]
    left = fleet.sglang.post("/destroy_weights_update_group", {"group_name": trainer.group_name})
    assert left.json()["success"] is True
    assert fleet.sglang.post("/v1/weights/pin").status_code == 200
    done = join().send(fleet.sglang, folder, whole, weight_version=f"step-{version}")
    assert done.json()["success"] is True, done.text
    serves(fleet, version, 2)


def test_what_does_not_fit_or_is_left_behind_is_not_served(fleet: Fleet, join: Join) -> None:
    trainer, before = join(), fleet.version
    folder = fleet.save(before + 1)
    part = described(fleet, told=True)
    trainer.send(fleet.sglang, folder, part)
    left = fleet.sglang.post(
        "/destroy_weights_update_group", {"group_name": trainer.group_name}
    ).json()
    assert left["success"] is True and "2 parameters" in left["message"]
    refused = trainer.update(fleet.sglang, part)
    assert refused.status_code == 400 and "there is no group" in refused.json()["message"]
    wrong = {"lm_head.weight": ("float32", [1, *part["lm_head.weight"][1]])}
    refused = join().send(fleet.sglang, folder, wrong)
    assert refused.status_code == 400 and "has shape" in refused.json()["message"]
    serves(fleet, before, 2)


def test_a_server_that_joins_later_reads_it_and_the_one_that_received_it_may_die(
    tmp_path: Path,
) -> None:
    with closing(Fleet(tmp_path, 1)) as fleet:
        trainer = Trainer("group")
        trainer.join(fleet.sglang)  # so the first server takes part
        fleet.join()
        part, whole = described(fleet, told=True), described(fleet)
        version, folder = next_folder(fleet)
        done = trainer.send(fleet.sglang, folder, whole, weight_version=f"step-{version}")
        assert done.json()["success"] is True, done.text
        fleet.join()
        serves(fleet, version, 3)
        kept = trainer.send(fleet.sglang, fleet.save(version + 1), part)
        assert "kept back" in kept.json()["message"]
        fleet.kill(0, 0)
        eventually(lambda: len(fleet.ready()) == 2, LIMIT_S, "its lease is over")
        gone = fleet.sglang.post("/continue_generation")
        assert gone.status_code == 400 and "is gone" in gone.json()["message"]
        fleet.sglang.resume()
        serves(fleet, version, 2)
        fleet.join()  # reads it from one that did not receive it
        successor = Trainer("group")
        assert successor.join(fleet.sglang).json()["success"] is True
        version, folder = next_folder(fleet)
        successor.send(fleet.sglang, folder, whole, weight_version=f"step-{version}")
        serves(fleet, version, 3)
        trainer.kill()
        successor.kill()
