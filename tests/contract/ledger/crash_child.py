"""Plays rollouts against a ledger until it is killed, printing every transition that returned."""

import asyncio
import itertools
import sys

from gateway.ledger.make import make_ledger
from tests.unit.gateway.ledger_suite import Play, ids


def acknowledge(event: str, rollout_id: str) -> None:
    sys.stdout.write(f"{event} {rollout_id}\n")
    sys.stdout.flush()


async def main(address: str, round_number: str) -> None:
    ledger = make_ledger(address)
    await ledger.open(f"child{round_number}", 0.01)
    play = Play(ledger)
    for index in itertools.count():
        name = f"r{round_number}-{index}"
        await play.submit(name, size=1)
        acknowledge("submit", name)
        await ledger.expire()
        leased = await play.lease()
        for number, rollout_id in enumerate(leased):
            acknowledge("lease", rollout_id)
            if index % 5 == 4:
                await ledger.requeue(play.leases[rollout_id], "so it goes")
                acknowledge("requeue", rollout_id)
                continue
            if index % 7 == 6:
                await ledger.fail(play.leases[rollout_id], "so it goes")
                acknowledge("fail", rollout_id)
                continue
            await play.complete(rollout_id, size=1)
            acknowledge("complete", rollout_id)
            (given,) = ids(await play.deliver(1, f"d-{name}-{number}"))
            acknowledge("deliver", given)
            await play.consume(given)
            acknowledge("consume", given)


asyncio.run(main(sys.argv[1], sys.argv[2]))
