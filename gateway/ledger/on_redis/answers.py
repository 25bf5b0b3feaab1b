"""Results of the scripts, as records and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway.ledger.auditor import AuditFindings
from gateway.ledger.records import Delivery, Entry, Event, Lease
from gateway.ledger.refusals import (
    forgotten,
    given_out,
    never_submitted,
    no_such_page,
    rollouts_failed,
    used_by_others,
)
from gateway.ledger.transitions import WITHOUT_RESULT, illegal, unknown
from headway.contracts.errors import ServiceError
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import RolloutRequest


def texts(values: Sequence[Any]) -> list[str]:
    """Bulk strings as text."""
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


def pairs(flat: Sequence[Any]) -> dict[str, str]:
    """Return the fields that HGETALL answers."""
    fields = texts(flat)
    return dict(zip(fields[::2], fields[1::2], strict=True))


def lease_of(row: Sequence[Any]) -> Lease:
    """One row of `lease`."""
    text, attempt, fence, age_s = row
    request = RolloutRequest.model_validate_json(text)
    return Lease(request, int(attempt), float(age_s), int(fence))


def delivery_of(answer: Sequence[Any], delivery_id: str) -> Delivery:
    """The answer of `deliver` and `deliver_exactly`.

    Raises:
        Conflict, RolloutsFailed, NotFound: as the protocol says.
    """
    status = answer[0].decode()
    if status not in ("ok", "none"):
        raise _refusal(status, texts(answer[1:]), delivery_id)
    num_ready, dropped, is_held_back = answer[1:4]
    if status == "none":
        return Delivery(None, num_ready, dropped, bool(is_held_back))
    payloads, given = answer[4:]
    return Delivery(tuple(payloads), num_ready, dropped, given=tuple(map(tuple, given)))


def _refusal(status: str, values: Sequence[str], delivery_id: str) -> ServiceError:
    if status == "used":
        return used_by_others(delivery_id)
    if status == "forgotten":
        return forgotten(delivery_id)
    if status == "unknown":
        return never_submitted(values[0])
    refused = list(zip(values[::3], values[1::3], values[2::3], strict=True))
    ended = [row for row in refused if row[1] in WITHOUT_RESULT]
    return rollouts_failed(ended) if ended else given_out(refused[0][0])


def check_consumed(answer: Sequence[Any]) -> None:
    """Raise what `consume` refused.

    Raises:
        Conflict, NotFound: as the protocol says.
    """
    status, *values = texts(answer)
    if status == "unknown":
        raise unknown(values[0])
    if status == "illegal":
        raise illegal(values[0], "consume", values[1])


def entry_of(flat: Sequence[Any], payload: bytes | None = None) -> Entry:
    """A rollout from its hash."""
    fields = pairs(flat)

    def number(name: str) -> int | None:
        return int(fields[name]) if fields.get(name) else None

    mean_reward = fields.get("mean_reward")
    return Entry(
        request=RolloutRequest.model_validate_json(fields["request"]),
        state=fields["state"],  # type: ignore[arg-type]
        attempt=int(fields["attempt"]),
        submitted_at=float(fields["submitted_at"]),
        changed_at=float(fields["changed_at"]),
        oldest_version=number("oldest"),
        staleness=number("staleness"),
        reason=fields.get("reason") or None,
        step=number("step"),
        mean_reward=float(mean_reward) if mean_reward else None,
        payload=payload,
    )


def event_of(line: bytes) -> Event:
    """One line of a log."""
    event, at, detail = line.decode().split(" ", 2)
    return Event(event, detail or None, float(at))


def page_of(answer: Sequence[Any], before: str | None) -> list[Entry]:
    """The answer of `find`.

    Raises:
        NotFound: `before` is not in the ledger.
    """
    if answer[0] != b"ok":
        raise no_such_page(str(before))
    return [entry_of(row) for row in answer[1]]


@dataclass(frozen=True, slots=True)
class Tallies:
    """Running counts of the ledger, at one revision."""

    revision: int
    trajectories: Mapping[RolloutState, int]
    forgotten: Mapping[RolloutState, int]
    findings: AuditFindings


def tallies_of(answer: Sequence[Any]) -> Tallies:
    """The answer of `read_tallies`."""
    _, revision, trajectories, forgotten, findings = answer
    of_all = {
        field.rstrip(" "): number
        for field, number in _numbers(trajectories).items()
        if field.endswith(" ")
    }
    return Tallies(
        int(revision),
        cast("dict[RolloutState, int]", of_all),
        cast("dict[RolloutState, int]", _numbers(forgotten)),
        AuditFindings(**_numbers(findings)),
    )


def _numbers(flat: Sequence[Any]) -> dict[str, int]:
    return {name: int(number) for name, number in pairs(flat).items()}


def log_of(row: Sequence[Any]) -> tuple[str | None, int, int | None, list[str]]:
    """State, size, staleness and events of one rollout, of `read_logs` and `read_ended`."""
    state, size, staleness, events = row
    return (
        state.decode() or None,
        int(size),
        int(staleness) if staleness else None,
        texts(events),
    )
