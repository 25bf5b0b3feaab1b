"""Long random walks of two owners over one ledger, each step compared with a model in plain Python."""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gateway.ledger.base import Ledger
from gateway.ledger.make import make_ledger
from gateway.ledger.records import Capacity, Lease
from headway.contracts.errors import Conflict, Fenced, NotFound
from tests.unit.gateway.ledger_suite import ALL, SEVERAL_PROCESSES, Play, ids
from tests.unit.gateway.rollout_builders import make_group, make_request

NAMES = [f"r{number}" for number in range(40)]
CONSUMERS = ["me", "you", "he"]
BOUNDED = ("leased", "ready", "delivered", "consumed")
OPEN = ("queued", "leased", "ready", "delivered")


@dataclass
class Rollout:
    """What the model knows."""

    name: str
    seq: int
    consumer: str
    size: int
    priority: int
    state: str = "queued"
    fence: int = 0
    report: str | None = None
    admitted: int = 0
    oldest: int = 0
    delivery: str | None = None
    step: int | None = None
    has_payload: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return -self.priority, self.seq


@dataclass
class Model:
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    forgotten: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of(self, state: str, consumer: str | None = None) -> list[Rollout]:
        found = [r for r in self.rollouts.values() if r.state == state]
        return sorted(
            (r for r in found if consumer in (None, r.consumer)), key=lambda rollout: rollout.seq
        )

    def held(self, consumer: str) -> int:
        return sum(self.trajectories(state, consumer) for state in BOUNDED)

    def trajectories(self, state: str, consumer: str | None) -> int:
        forgotten = sum(
            self.forgotten[state, name] for name in CONSUMERS if consumer in (None, name)
        )
        return forgotten + sum(r.size for r in self.of(state, consumer))

    def lease(self, admission: Capacity) -> list[str]:
        """The heads of both lines, while they fit."""
        leased, free = [], admission.free
        while True:
            heads = []
            queued = sorted(self.of("queued"), key=lambda rollout: rollout.place)
            for line in (
                [r for r in queued if r.consumer == admission.consumer],
                [r for r in queued if r.consumer != admission.consumer],
            ):
                room = free
                if line and line[0].consumer == admission.consumer and admission.budget is not None:
                    room = min(free, admission.budget - self.held(line[0].consumer))
                if line and line[0].size <= room:
                    heads.append(line[0])
            if not heads:
                return leased
            head = min(heads, key=lambda rollout: rollout.place)
            head.state, head.fence, head.report = "leased", head.fence + 1, None
            head.admitted = admission.version
            free -= head.size
            leased.append(head.name)

    def deliver(
        self,
        delivery: str,
        count: int,
        consumer: str,
        version: int,
        bound: int | None,
        learner: int,
    ) -> tuple[list[str] | None, int, bool]:
        """Ids or None, trajectories dropped, whether it was held back."""
        dropped = 0
        ready = self.of("ready", consumer)
        if bound is not None:
            for r in [r for r in ready if r.oldest < learner - bound]:
                r.state, r.has_payload = "stale", False
                dropped += r.size
            ready = sorted(self.of("ready", consumer), key=lambda r: (r.oldest, r.seq))
        if len(ready) < count:
            return None, dropped, False
        if bound is not None and any(
            r.admitted <= version - bound for r in self.of("leased", consumer)
        ):
            return None, dropped, True
        chosen = sorted(ready[:count], key=lambda rollout: rollout.seq)
        for r in chosen:
            r.state, r.delivery = "delivered", delivery
        return [r.name for r in chosen], dropped, False


class Machine:
    """Two owners of one ledger."""

    def __init__(self, address: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.runner = asyncio.Runner()
        self.model = Model()
        self.leases: list[Lease] = []
        self.deliveries: dict[str, tuple[int, str, list[str]]] = {}
        self.serial = itertools.count()
        self.version = 0
        self.seen: Counter[str] = Counter()
        self.ledgers = [make_ledger(address) for _ in range(2)]
        for ledger in self.ledgers:
            self.run(ledger.open("owner", 600.0))

    def run(self, call):
        return self.runner.run(call)

    def ledger(self, owner: int) -> Ledger:
        return self.ledgers[owner]

    def close(self) -> None:
        self.run(Play(self.ledgers[0]).check())
        for ledger in self.ledgers:
            self.run(ledger.close())
        self.runner.close()

    def submit(self, owner, wanted):
        requests = [
            make_request(name, size, consumer=consumer, priority=priority)
            for name, consumer, size, priority in wanted
        ]
        before = dict(self.model.rollouts)
        new = []
        try:
            for name, consumer, size, priority in wanted:
                known = self.model.rollouts.get(name)
                if known is None:
                    seq = next(self.serial)
                    self.model.rollouts[name] = Rollout(name, seq, consumer, size, priority)
                elif (known.consumer, known.size, known.priority) != (consumer, size, priority):
                    raise Conflict("other content")
                new.append(known is None)
        except Conflict:
            self.model.rollouts = before
            with pytest.raises(Conflict):
                self.run(self.ledger(owner).submit(requests, ALL))
        else:
            assert self.run(self.ledger(owner).submit(requests, ALL)) == new

    def lease(self, owner, free, consumer, budget):
        admission = Capacity(self.version, free, consumer, budget if consumer else None)
        leases = self.run(self.ledger(owner).lease(admission))
        assert [lease.rollout_id for lease in leases] == self.model.lease(admission)
        for lease in leases:
            assert lease.fence == self.model.rollouts[lease.rollout_id].fence
        self.leases += leases
        if admission.budget is not None:
            started = sum(
                lease.request.prompt.group_size
                for lease in leases
                if lease.request.consumer == consumer
            )
            assert not started or self.model.held(consumer) <= admission.budget

    def train(self, owner, step):
        """Half of what was delivered is consumed."""
        given = [r.name for r in self.model.of("delivered", "me")]
        self.consume(owner, given[: (len(given) + 1) // 2], step, step - 1)

    def report(self, owner, index, event):
        if not self.leases:
            return
        lease, ledger = self.leases[-1 - index % len(self.leases)], self.ledger(owner)
        known = self.model.rollouts[lease.rollout_id]
        call = {
            "complete": lambda: ledger.complete(
                lease, make_group(lease.rollout_id, known.size, known.admitted)
            ),
            "filter": lambda: ledger.drop_filtered(lease, "reason", 0.5),
            "fail": lambda: ledger.fail(lease, "reason"),
            "requeue": lambda: ledger.requeue(lease, "reason"),
        }[event]
        if known.fence == lease.fence and known.report == event:
            self.run(call())
        elif known.fence != lease.fence or known.state != "leased":
            with pytest.raises(Fenced):
                self.run(call())
        else:
            self.run(call())
            ends = {"complete": "ready", "filter": "filtered", "fail": "failed"}
            known.state, known.report = ends.get(event, "queued"), event
            if event == "complete":
                known.oldest, known.has_payload = known.admitted, True

    def deliver(self, owner, count, consumer, bound, ahead):
        name = f"d{next(self.serial)}"
        asked = (name, count, consumer, self.version, bound, self.version + ahead)
        found = self.run(self.ledger(owner).deliver(*asked))
        given, dropped, is_held_back = self.model.deliver(*asked)
        assert (found.payloads and ids(found)) == given
        assert (found.dropped, found.is_held_back) == (dropped, is_held_back)
        self.seen.update(given=given is not None, held=is_held_back, dropped=dropped)
        if given is not None:
            self.deliveries[name] = (count, consumer, given)

    def deliver_again(self, owner, index):
        if not self.deliveries:
            return
        name = list(self.deliveries)[-1 - index % len(self.deliveries)]
        count, consumer, _ = self.deliveries[name]
        given = [
            r
            for state in ("delivered", "consumed")
            for r in self.model.of(state)
            if r.delivery == name
        ]
        if not given:
            return  # it would be a new delivery
        call = self.ledger(owner).deliver(name, count, consumer, self.version, None)
        if all(r.has_payload for r in given):
            self.seen["again"] += 1
            expected = [r.name for r in sorted(given, key=lambda rollout: rollout.seq)]
            assert ids(self.run(call)) == expected
        else:
            with pytest.raises(Conflict):
                self.run(call)

    def consume(self, owner, wanted, step, safe):
        call = self.ledger(owner).consume(wanted, step, safe)
        rollouts = [self.model.rollouts.get(name) for name in wanted]
        if not all(
            r and (r.state == "delivered" or (r.state, r.step) == ("consumed", step))
            for r in rollouts
        ):
            with pytest.raises((Conflict, NotFound)):
                self.run(call)
            return
        self.run(call)
        for r in rollouts:
            r.state, r.step = "consumed", step
        for consumer in {r.consumer for r in rollouts}:
            for r in self.model.of("consumed", consumer):
                r.has_payload = r.has_payload and r.step > safe

    def give_back(self, owner, consumer, step):
        back = self.model.of("delivered", consumer)
        back += [r for r in self.model.of("consumed", consumer) if r.step > step]
        assert self.run(self.ledger(owner).give_back(consumer, step)) == len(back)
        for r in back:
            r.state = "ready" if r.has_payload else "queued"
            r.step = r.delivery = None

    def start_anew(self) -> None:
        """Forget what ended, so that its names are new again."""
        gone = [
            r
            for r in self.model.rollouts.values()
            if r.state not in OPEN and not (r.state == "consumed" and r.has_payload)
        ]
        assert self.run(self.ledgers[0].compact(0.0)) == len(gone)
        for r in gone:
            del self.model.rollouts[r.name]
            self.model.forgotten[r.state, r.consumer] += r.size
        self.leases = [lease for lease in self.leases if lease.rollout_id in self.model.rollouts]

    def end(self, rollouts: list[Rollout]) -> None:
        for r in rollouts:
            r.state, r.has_payload = "cancelled", False

    def cancel(self, owner, wanted):
        known = [self.model.rollouts[name] for name in set(wanted) & self.model.rollouts.keys()]
        ended = [r for r in known if r.state in OPEN]
        assert self.run(self.ledger(owner).cancel(wanted, "reason")) == len(ended)
        self.end(ended)

    def cancel_all(self, owner, consumer):
        ended = [r for state in OPEN for r in self.model.of(state, consumer)]
        size = sum(r.size for r in ended)
        assert self.run(self.ledger(owner).cancel_all(consumer, "reason")) == size
        self.end(ended)

    def revive(self, owner, wanted):
        failed = [r for r in self.model.of("failed") if r.name in wanted]
        assert self.run(self.ledger(owner).revive(wanted)) == len(failed)
        for r in failed:
            r.state = "queued"

    def publish(self):
        self.version += 1

    def counts_agree(self):
        for consumer in (None, "me"):
            counts = self.run(self.ledgers[0].counts(consumer)).model_dump()
            assert counts.pop("submitted") == sum(counts.values())
            for state, number in counts.items():
                assert number == self.model.trajectories(state, consumer)
        outstanding = sum(len(self.model.of(state, "me")) for state in OPEN[:3])
        assert self.run(self.ledgers[1].outstanding("me")) == outstanding

    def walk(self, num_steps: int) -> None:
        """Take random steps, likelier those that a run is made of."""
        pick, number = self.random.choice, self.random.randint
        names = [f"r{index}" for index in range(60)]
        consumers = ["me", "me", "me", "you", "he"]

        def some(most: int) -> list[str]:
            return [pick(names) for _ in range(number(0, most))]

        steps = {
            lambda: self.submit(
                pick([0, 1]),
                [
                    (name, pick(consumers), pick([1, 1, 1, 2, 3]), pick([0, 0, 0, 1, -1]))
                    for name in some(4)
                ],
            ): 6,
            lambda: self.lease(
                pick([0, 1]), number(-1, 6), pick(["me", None, "you"]), pick([None, None, 8, 40])
            ): 6,
            lambda: self.report(
                pick([0, 1]),
                number(0, 12),
                pick(["complete"] * 6 + ["filter", "fail", "requeue", "requeue"]),
            ): 14,
            lambda: self.deliver(
                *(pick([0, 1]), number(1, 2), pick(consumers)),
                *(pick([None, 0, 1, 1, 2]), pick([0, 0, 0, 1])),
            ): 10,
            lambda: self.deliver_again(pick([0, 1]), number(0, 10)): 3,
            lambda: self.train(pick([0, 1]), number(0, 3)): 4,
            lambda: self.consume(pick([0, 1]), some(2), number(0, 3), number(-1, 2)): 1,
            lambda: self.give_back(pick([0, 1]), pick(consumers), number(-1, 2)): 1,
            lambda: self.cancel(pick([0, 1]), some(2)): 1,
            lambda: self.cancel_all(pick([0, 1]), pick(["you", "he"])): 1,
            lambda: self.revive(pick([0, 1]), some(10)): 2,
            self.publish: 2,
        }
        for step in self.random.choices(list(steps), list(steps.values()), k=num_steps):
            step()
            self.counts_agree()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("store", SEVERAL_PROCESSES)
def test_a_ledger_does_what_the_model_does(store, seed, address):
    machine = Machine(address, seed)
    try:
        for _ in range(6):
            machine.walk(150)
            machine.start_anew()
        assert min(machine.seen[name] for name in ("given", "held", "dropped", "again")) > 0
    finally:
        machine.close()
