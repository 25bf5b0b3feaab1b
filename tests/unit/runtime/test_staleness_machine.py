"""Whatever order generations finish in, admission keeps every consumed group within η.

The machine plays the executor, the ledger and the trainer by their rules: groups are admitted in
submission order within capacity, finish in any order, and a batch takes the oldest finished ones
unless a due group is still in play. Then nothing is ever too stale, so nothing has to be dropped.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.runtime.staleness import StalenessController, StalenessSnapshot


class Bound(RuleBasedStateMachine):
    @initialize(
        group_size=st.integers(1, 3),
        groups_per_batch=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        max_concurrent=st.integers(3, 30),
        first_version=st.integers(0, 5),
    )
    def begin(self, group_size, groups_per_batch, max_staleness, max_concurrent, first_version):
        self.size, self.count, self.bound = group_size, groups_per_batch, max_staleness
        self.max_concurrent, self.version = max_concurrent, first_version
        self.batch = group_size * groups_per_batch
        self.is_taken = False  # this version's batch was consumed, the next version is not out
        self.next_id = 0
        self.queued: list[int] = []
        self.running: dict[int, int] = {}  # id -> version at admission
        self.ready: dict[int, int] = {}
        self.controller = StalenessController(max_concurrent)
        self.controller.attach(
            self.batch, self.bound, StalenessSnapshot(first_version, first_version * self.batch)
        )

    @rule(num=st.integers(1, 12))
    def submit(self, num):
        self.queued += range(self.next_id, self.next_id + num)
        self.next_id += num

    @rule(most=st.integers(1, 12))
    def admit(self, most):
        while most and self.queued and self.size <= self.controller.capacity():
            oldest = self.queued.pop(0)
            self.controller.start(str(oldest), self.size)
            self.running[oldest] = self.version
            most -= 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        done = data.draw(st.sampled_from(sorted(self.running)))
        self.controller.accept(str(done))
        self.ready[done] = self.running.pop(done)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_requeued=st.booleans())
    def fail_or_requeue(self, data, is_requeued):
        lost = data.draw(st.sampled_from(sorted(self.running)))
        self.controller.release(str(lost))
        del self.running[lost]
        if is_requeued:
            self.queued = sorted([lost, *self.queued])

    @precondition(lambda self: not self.is_taken)
    @rule()
    def consume(self):
        if self.controller.has_due_running() or len(self.ready) < self.count:
            return
        assert min(self.ready.values()) >= self.version - self.bound, "a group had to be dropped"
        for oldest in sorted(self.ready)[: self.count]:
            assert self.version - self.ready.pop(oldest) <= self.bound
        self.is_taken = True

    @rule(num_laps=st.integers(1, 4))
    def leave_the_oldest_behind(self, num_laps):
        """Long generations are overtaken by short ones, version after version."""
        for _ in range(num_laps):
            self.submit(self.count + 1)
            self.admit(self.max_concurrent)
            for overtaking in sorted(self.running)[1:]:
                self.controller.accept(str(overtaking))
                self.ready[overtaking] = self.running.pop(overtaking)
            if not self.is_taken:
                self.consume()
            if self.is_taken:
                self.publish()

    @precondition(lambda self: self.is_taken)
    @rule()
    def publish(self):
        self.is_taken = False
        self.version += 1
        self.controller.set_version(self.version)

    @precondition(lambda self: not self.is_taken)
    @rule()
    def restart(self):
        """What is in play goes back to the queue; the counters come back from the ledger."""
        self.queued = sorted([*self.running, *self.queued])
        self.running.clear()
        accepted = self.version * self.batch + len(self.ready) * self.size
        self.controller = StalenessController(self.max_concurrent)
        self.controller.attach(self.batch, self.bound, StalenessSnapshot(self.version, accepted))

    @invariant()
    def the_counts_agree(self):
        assert self.controller.running == len(self.running) * self.size <= self.max_concurrent
        consumed = (self.version + self.is_taken) * self.batch
        accepted = consumed + len(self.ready) * self.size
        assert self.controller.snapshot() == StalenessSnapshot(self.version, accepted)

    @invariant()
    def the_next_batch_is_never_starved(self):
        """A batch can always be filled: what is kept, in play and admissible covers it."""
        if self.is_taken or self.size > self.max_concurrent or self.running:
            return
        admissible = max(0, min(self.controller.capacity(), self.controller.free()))
        assert len(self.ready) >= self.count or admissible >= self.size


TestBound = Bound.TestCase
TestBound.settings = settings(max_examples=120, stateful_step_count=40)
