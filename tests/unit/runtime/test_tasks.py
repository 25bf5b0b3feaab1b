import asyncio

import pytest

from headway.runtime.tasks import Signal, cancel_and_wait, run_to_end, run_uncancelled


class Work:
    """Ends when it is let, and says so."""

    def __init__(self) -> None:
        self.begun, self.let, self.is_done = asyncio.Event(), asyncio.Event(), False

    async def run(self) -> int:
        self.begun.set()
        await self.let.wait()
        self.is_done = True
        return 3


async def test_tasks_are_cancelled_and_have_ended():
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(1)

    ended: list[int] = []
    tasks = [asyncio.create_task(stubborn()) for _ in range(2)]
    await asyncio.sleep(0)
    await cancel_and_wait([*tasks, None])
    assert ended == [1, 1]
    assert all(task.cancelled() for task in tasks)


async def test_work_that_runs_to_its_end_is_cancelled_after_it():
    work = Work()
    task = asyncio.create_task(run_to_end(work.run()))
    await work.begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    work.let.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.is_done


async def test_work_that_cannot_be_undone_drops_the_cancellation():
    work = Work()
    task = asyncio.create_task(run_uncancelled(work.run()))
    await work.begun.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    work.let.set()
    assert await task == 3


async def test_a_signal_wakes_who_looked_before():
    signal = Signal()
    before = signal.event()
    signal.notify()
    assert before.is_set()
    assert not signal.event().is_set()
    assert signal.count == 1
