"""`headway ledger export`: rows for data frames, one per rollout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gateway.ledger.base import LedgerReader
from gateway.ledger.records import row_of
from headway.contracts.errors import ConfigError
from headway.contracts.http.rollouts import RolloutState

PAGE = 1000
INTEGERS = ("group_size", "attempt", "oldest_version", "staleness", "step")
NUMBERS = ("submitted_at", "changed_at", "mean_reward")
COLUMNS = (
    "rollout_id",
    "consumer",
    "group_id",
    "group_size",
    "workflow",
    "reward",
    "state",
    "attempt",
    "submitted_at",
    "changed_at",
    "oldest_version",
    "staleness",
    "mean_reward",
    "step",
    "reason",
)
"""Columns of `row_of`; those in neither tuple above are text."""


Append = Callable[[list[dict[str, Any]]], None]
"""Writes further rows to a file."""


async def export(
    ledger: LedgerReader, file: Path, state: RolloutState | None, consumer: str | None
) -> None:
    """Write the file whole or not at all."""
    part = file.with_name(file.name + ".part")
    num_rows = 0
    try:
        with (_parquet if file.suffix == ".parquet" else _json_lines)(part) as append:
            async for rows in _pages(ledger, state, consumer):
                append(rows)
                num_rows += len(rows)
        os.replace(part, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    sys.stdout.write(f"{num_rows} rollouts in {file}\n")


async def _pages(
    ledger: LedgerReader, state: RolloutState | None, consumer: str | None
) -> AsyncIterator[list[dict[str, Any]]]:
    before = None
    while entries := await ledger.find(state, consumer, PAGE, before):
        yield [row_of(entry) for entry in entries]
        before = entries[-1].request.rollout_id


@contextmanager
def _json_lines(path: Path) -> Iterator[Append]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda rows: file.writelines(json.dumps(row) + "\n" for row in rows)


@contextmanager
def _parquet(path: Path) -> Iterator[Append]:
    """One row group per page."""
    try:
        # A gateway never needs it.
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            "Parquet needs pyarrow; install Headway with the extra 'export', or name a .jsonl file"
        ) from error
    schema = pyarrow.schema([(name, _type_of(name)) for name in COLUMNS])
    table = pyarrow.Table
    with closing(pyarrow.parquet.ParquetWriter(path, schema)) as writer:
        yield lambda rows: writer.write_table(table.from_pylist(rows, schema=schema))


def _type_of(name: str) -> str:
    if name in INTEGERS:
        return "int64"
    return "float64" if name in NUMBERS else "string"
