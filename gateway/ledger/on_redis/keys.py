"""Every key of the Redis ledger, below one prefix; those that end with a colon take a name.

Redis Cluster is served if the prefix holds a hash tag, `{headway}`: then all keys are in one slot.
"""

from __future__ import annotations

KEYS = {
    "schema": "schema",  # number of this layout
    "revision": "revision",  # changes so far
    "seq": "seq",  # submissions so far
    "rollout": "rollout:",  # ID -> hash: the request and its state
    "payload": "payload:",  # ID -> the codec payload
    "events": "events:",  # ID -> list of "EVENT AT DETAIL"
    "order": "order",  # ids by submission
    "order_of": "order:",  # CONSUMER -> the same
    "state": "state:",  # STATE and STATE:CONSUMER -> ids by submission
    "queue": "queue:",  # CONSUMER -> queued ids by priority, then submission
    "heads": "heads",  # consumers with a queue, by the place of its head
    "later": "later",  # queued ids that wait for a version, by that version
    "leases": "leases",  # leased ids by the time at which the lease ends
    "admitted": "admitted:",  # CONSUMER -> leased ids by the version that they were admitted at
    "oldest": "oldest:",  # CONSUMER -> ready ids by their oldest version
    "delivery": "delivery:",  # DELIVERY -> set of the ids that it gave out
    "steps": "steps:",  # CONSUMER -> consumed ids by step
    "kept": "kept:",  # CONSUMER -> those of them whose payload is kept
    "ended": "ended",  # ended ids by the time at which they did
    "deadlines": "deadlines",  # queued and leased ids by the time at which they fail
    "groups": "groups",  # hash "STATE CONSUMER" -> groups; the consumer "" is the sum over all
    "trajectories": "trajectories",  # the same in trajectories
    "forgotten": "forgotten",  # hash STATE -> trajectories of forgotten rollouts
    "findings": "findings",  # hash: what the logs of forgotten rollouts amounted to
    "notes": "notes",  # hash KEY -> value
    "call": "call:",  # CALL -> its answer, for a while, in case the call is repeated
}

SCHEMA = "1"


def lua_table() -> str:
    """The same table for the scripts."""
    rows = ", ".join(f"{name} = '{key}'" for name, key in KEYS.items())
    return f"local NAMES = {{{rows}}}\n"
