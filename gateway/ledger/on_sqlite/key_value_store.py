"""`KeyValueStore` on SQLite."""

from __future__ import annotations

from gateway.ledger.on_sqlite.transaction import Transaction


def get_value(transaction: Transaction, key: str) -> str | None:
    """A note's value."""
    row = transaction.db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_value(transaction: Transaction, key: str, value: str) -> None:
    """Set a note, whatever it was."""
    transaction.db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))
    transaction.touch()


def compare_and_set(transaction: Transaction, key: str, old: str | None, new: str) -> bool:
    """Set a note if it is `old` still; whether it was."""
    is_old = get_value(transaction, key) == old
    if is_old:
        set_value(transaction, key, new)
    return is_old
