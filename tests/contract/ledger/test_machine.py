"""Any order of calls by two owners, against a model in plain Python."""

import asyncio
import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from ledger_suite import ALL, SEVERAL_PROCESSES, Play, ids
from rollout_builders import make_group, make_request

from headway.contracts.errors import Conflict, Fenced, NotFound
from headway.rollout.ledger.base import Admission, Lease, Ledger
from headway.rollout.ledger.make import make_ledger

NAMES = [f"r{number}" for number in range(12)]
CONSUMERS = ["me", "you", "he"]
BOUNDED = ("leased", "ready", "delivered", "consumed")
OPEN = ("queued", "leased", "ready", "delivered")
names = st.sampled_from(NAMES)
some_names = st.lists(names, max_size=4)
consumers = st.sampled_from(CONSUMERS)
owners = st.sampled_from([0, 1])
staleness = st.sampled_from([None, 0, 1, 2])


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

    def of(self, state: str, consumer: str | None = None) -> list[Rollout]:
        found = [r for r in self.rollouts.values() if r.state == state]
        return sorted(
            (r for r in found if consumer in (None, r.consumer)), key=lambda rollout: rollout.seq
        )

    def held(self, consumer: str) -> int:
        return sum(r.size for state in BOUNDED for r in self.of(state, consumer))

    def lease(self, admission: Admission) -> list[str]:
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
        self, delivery: str, count: int, consumer: str, version: int, bound: int | None
    ) -> tuple[list[str] | None, int, bool]:
        """Ids or None, trajectories dropped, whether it was held back."""
        dropped = 0
        ready = self.of("ready", consumer)
        if bound is not None:
            for r in [r for r in ready if r.oldest < version - bound]:
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


class Machine(RuleBasedStateMachine):
    """Two owners of one ledger."""

    address: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = Model()
        self.leases: list[Lease] = []
        self.deliveries: dict[str, tuple[int, str, list[str]]] = {}
        self.serial = itertools.count()
        self.version = 0
        address = self.make_address()
        self.ledgers = [make_ledger(address) for _ in range(2)]
        for ledger in self.ledgers:
            self.run(ledger.open("owner", 600.0))

    @staticmethod
    def make_address() -> str:
        raise NotImplementedError

    def run(self, call):
        return self.runner.run(call)

    def ledger(self, owner: int) -> Ledger:
        return self.ledgers[owner]

    def teardown(self) -> None:
        self.run(Play(self.ledgers[0]).check())
        for ledger in self.ledgers:
            self.run(ledger.close())
        self.runner.close()

    @rule(
        owner=owners,
        wanted=st.lists(
            st.tuples(names, consumers, st.integers(1, 3), st.integers(-1, 1)), max_size=5
        ),
    )
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

    @rule(
        owner=owners,
        free=st.integers(-1, 6),
        consumer=st.sampled_from([*CONSUMERS, None]),
        budget=st.sampled_from([None, 0, 4, 8]),
    )
    def lease(self, owner, free, consumer, budget):
        admission = Admission(self.version, free, consumer, budget if consumer else None)
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

    @rule(
        owner=owners,
        index=st.integers(0, 30),
        event=st.sampled_from(["complete", "complete", "filter", "fail", "requeue"]),
    )
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

    @rule(owner=owners, count=st.integers(1, 3), consumer=consumers, bound=staleness)
    def deliver(self, owner, count, consumer, bound):
        name = f"d{next(self.serial)}"
        found = self.run(self.ledger(owner).deliver(name, count, consumer, self.version, bound))
        given, dropped, is_held_back = self.model.deliver(
            name, count, consumer, self.version, bound
        )
        assert (found.payloads and ids(found)) == given
        assert (found.dropped, found.is_held_back) == (dropped, is_held_back)
        if given is not None:
            self.deliveries[name] = (count, consumer, given)

    @rule(owner=owners, index=st.integers(0, 10))
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
            expected = [r.name for r in sorted(given, key=lambda rollout: rollout.seq)]
            assert ids(self.run(call)) == expected
        else:
            with pytest.raises(Conflict):
                self.run(call)

    @rule(owner=owners, wanted=some_names, step=st.integers(0, 3), safe=st.integers(-1, 2))
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

    @rule(owner=owners, consumer=consumers, step=st.integers(-1, 2))
    def give_back(self, owner, consumer, step):
        back = self.model.of("delivered", consumer)
        back += [r for r in self.model.of("consumed", consumer) if r.step > step]
        assert self.run(self.ledger(owner).give_back(consumer, step)) == len(back)
        for r in back:
            r.state = "ready" if r.has_payload else "queued"
            r.step = r.delivery = None

    def end(self, rollouts: list[Rollout]) -> None:
        for r in rollouts:
            r.state, r.has_payload = "cancelled", False

    @rule(owner=owners, wanted=some_names)
    def cancel(self, owner, wanted):
        known = [self.model.rollouts[name] for name in set(wanted) & self.model.rollouts.keys()]
        ended = [r for r in known if r.state in OPEN]
        assert self.run(self.ledger(owner).cancel(wanted, "reason")) == len(ended)
        self.end(ended)

    @rule(owner=owners, consumer=consumers)
    def cancel_all(self, owner, consumer):
        ended = [r for state in OPEN for r in self.model.of(state, consumer)]
        size = sum(r.size for r in ended)
        assert self.run(self.ledger(owner).cancel_all(consumer, "reason")) == size
        self.end(ended)

    @rule(owner=owners, wanted=some_names)
    def revive(self, owner, wanted):
        failed = [r for r in self.model.of("failed") if r.name in wanted]
        assert self.run(self.ledger(owner).revive(wanted)) == len(failed)
        for r in failed:
            r.state = "queued"

    @rule()
    def publish(self):
        self.version += 1

    @invariant()
    def counts_agree(self):
        for consumer in (None, "me"):
            counts = self.run(self.ledgers[0].counts(consumer)).model_dump()
            assert counts.pop("submitted") == sum(counts.values())
            for state, number in counts.items():
                assert number == sum(r.size for r in self.model.of(state, consumer))
        outstanding = sum(len(self.model.of(state, "me")) for state in OPEN[:3])
        assert self.run(self.ledgers[1].outstanding("me")) == outstanding


@pytest.mark.parametrize("store", SEVERAL_PROCESSES)
def test_a_ledger_does_what_the_model_does(store, request):
    with tempfile.TemporaryDirectory() as folder:
        serial = itertools.count()

        class OnStore(Machine):
            @staticmethod
            def make_address() -> str:
                if store == "redis":
                    return request.getfixturevalue("redis_server").address()
                return str(Path(folder) / f"ledger{next(serial)}.sqlite")

        run_state_machine_as_test(
            OnStore,
            settings=settings(
                max_examples=25,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
