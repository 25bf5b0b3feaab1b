import asyncio

import pytest

from headway.runtime.fair_pool import CALLER, FairPool, time_limit
from tests.waiting import until


class Callers:
    """Tasks that take a turn, and keep it until they are told to go."""

    def __init__(self, turns: FairPool[str]) -> None:
        self._turns = turns
        self._tasks: list[asyncio.Task[None]] = []
        self.holding: list[tuple[str, str]] = []
        self.served: list[str] = []
        self._go: dict[str, asyncio.Event] = {}

    def come(self, name: str) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(self._stay(name)))
        return self._tasks[-1]

    def go(self, name: str) -> None:
        self._go[name].set()

    async def _stay(self, name: str) -> None:
        CALLER.set(name[0])
        self._go[name] = asyncio.Event()
        async with self._turns.take() as thing:
            self.holding.append((name, thing))
            self.served.append(name)
            await self._go[name].wait()
        self.holding.remove((name, thing))


async def serve_all(callers: Callers, names: list[str]) -> list[str]:
    tasks = {name: callers.come(name) for name in names}
    for _ in names:
        await until(lambda: callers.holding)
        ((name, _),) = callers.holding
        callers.go(name)
        await tasks[name]
    return callers.served


async def test_callers_take_turns_however_many_one_of_them_has():
    served = await serve_all(Callers(FairPool(["one"])), ["a1", "a2", "a3", "a4", "b1", "b2", "c1"])
    assert served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_spare_thing_is_for_a_caller_that_holds_none():
    callers = Callers(FairPool(["one"], ["spare"]))
    tasks = {name: callers.come(name) for name in ("a1", "a2", "b1", "b2", "c1")}
    await until(lambda: len(callers.holding) == 2)
    assert callers.holding == [("a1", "one"), ("b1", "spare")]
    for name, then in (("b1", "b2"), ("b2", "c1")):
        callers.go(name)
        await until(lambda then=then: (then, "spare") in callers.holding)
    for name in ("c1", "a1", "a2"):  # the spare one is free, and "a" waits for the other
        assert name == "a2" or "a2" not in callers.served
        await until(lambda name=name: name in callers.served)
        callers.go(name)
        await tasks[name]


async def test_who_holds_a_spare_thing_waits_though_another_is_free():
    callers = Callers(FairPool(["one"], ["spare"]))
    other = callers.come("a1")
    await until(lambda: callers.holding)
    holder, waiter = callers.come("b1"), callers.come("b2")
    await until(lambda: ("b1", "spare") in callers.holding)
    callers.go("a1")
    await other
    assert callers.served == ["a1", "b1"]
    callers.go("b1")
    await holder
    await until(lambda: ("b2", "one") in callers.holding)
    callers.go("b2")
    await waiter


async def test_who_is_cancelled_while_waiting_or_holding_leaves_the_turn_to_the_next():
    callers = Callers(FairPool(["one"]))
    holder, waiter, last = (callers.come(name) for name in ("a1", "b1", "c1"))
    await until(lambda: callers.holding)
    waiter.cancel()
    holder.cancel()
    await until(lambda: "c1" in callers.served)
    callers.go("c1")
    await last
    assert callers.served == ["a1", "c1"]


async def test_turn_that_came_with_the_cancellation_is_given_on():
    turns = FairPool(["one"])
    callers = Callers(turns)
    first, second = callers.come("a1"), callers.come("b1")
    await until(lambda: callers.holding)
    callers.go("a1")
    await first  # its turn went to the second, who has not woken up yet, or just has
    second.cancel()
    third = callers.come("c1")
    await until(lambda: "c1" in callers.served)
    callers.go("c1")
    await third


async def test_clock_stands_still_for_who_waits_for_a_turn():
    turns = FairPool(["one"])
    callers = Callers(turns)
    callers.come("a1")
    await until(lambda: callers.holding)
    loop = asyncio.get_running_loop()

    async def in_time() -> str:
        async with time_limit(0.5), turns.take() as thing:
            return thing

    waiting, began = asyncio.create_task(in_time()), loop.time()
    await until(lambda: loop.time() > began + 0.75)
    callers.go("a1")
    assert await waiting == "one"


async def test_clock_runs_for_who_holds_a_turn():
    turns = FairPool(["one"])
    with pytest.raises(TimeoutError):
        async with time_limit(0.01), turns.take():
            await asyncio.Event().wait()
