"""Plays rollouts against a ledger until it is killed, printing every transition that returned."""

import asyncio
import itertools
import sys
from pathlib import Path

from ledger_suite import STORES, UNBOUNDED
from rollout_builders import make_group, make_request

from headway.contracts.codec import decode_groups


def acknowledge(event: str, rollout_id: str) -> None:
    sys.stdout.write(f"{event} {rollout_id}\n")
    sys.stdout.flush()


async def main(store_name: str, folder: Path, round_number: str) -> None:
    ledger = next(store for store in STORES if store.name == store_name).make(folder)
    await ledger.open()
    for index in itertools.count():
        name = f"r{round_number}-{index}"
        await ledger.submit([make_request(name, size=1)], 10**6)
        acknowledge("submit", name)
        lease = await ledger.lease(UNBOUNDED, 0)
        leased = lease.request.rollout_id
        acknowledge("lease", leased)
        if index % 5 == 4:
            await ledger.requeue(leased, "so it goes")
            acknowledge("requeue", leased)
            continue
        if index % 7 == 6:
            await ledger.fail(leased, "so it goes")
            acknowledge("fail", leased)
            continue
        await ledger.complete(make_group(leased, size=1))
        acknowledge("complete", leased)
        delivery = await ledger.deliver(name, 1, "default", None, 0, None)
        (payload,) = delivery.payloads
        (group,) = decode_groups(payload)
        acknowledge("deliver", group.rollout_id)
        await ledger.consume([group.rollout_id], 0, -1)
        acknowledge("consume", group.rollout_id)


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
