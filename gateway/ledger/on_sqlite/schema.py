"""Tables and indexes of the SQLite ledger, and how a file of an older release is brought up to them.

Every transition touches few small index entries: an index covers the rollouts of the states that it
serves, and no others. Payloads are stored beside the rows, so that a transition copies none.
"""

from __future__ import annotations

import sqlite3

from headway.contracts.errors import ConfigError

VERSION = 2
"""`PRAGMA user_version`; a file without a version and with tables is of release 0.x."""

ENDED = "state IN ('consumed', 'failed', 'filtered', 'stale', 'cancelled')"
PENDING = "deadline IS NOT NULL AND state IN ('queued', 'leased')"
"""Condition that a query must repeat word for word for the partial index to serve it."""

IN_LINE = "CREATE INDEX in_line ON rollouts (consumer, seq) WHERE state = 'ready'"
"""Without it, the oldest ready groups are looked for among all that ever were."""

TABLES = f"""
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    consumer TEXT NOT NULL,
    request TEXT NOT NULL,
    size INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    min_version INTEGER NOT NULL,
    state TEXT NOT NULL,
    num_events INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    fence INTEGER NOT NULL DEFAULT 0,
    report TEXT,
    owner TEXT,
    expires REAL,
    admitted INTEGER,
    oldest_version INTEGER,
    staleness INTEGER,
    mean_reward REAL,
    reason TEXT,
    delivery_id TEXT,
    step INTEGER,
    has_payload INTEGER NOT NULL DEFAULT 0,
    submitted_at REAL NOT NULL,
    since REAL NOT NULL,
    timeout_s REAL,
    deadline REAL,
    changed_at REAL NOT NULL
);
CREATE INDEX of_consumer ON rollouts (consumer, seq);
CREATE INDEX queued ON rollouts (consumer, priority DESC, seq, min_version, size)
    WHERE state = 'queued';
CREATE INDEX leased ON rollouts (consumer, admitted) WHERE state = 'leased';
CREATE INDEX ready ON rollouts (consumer, oldest_version, seq) WHERE state = 'ready';
{IN_LINE};
CREATE INDEX delivered ON rollouts (consumer) WHERE state = 'delivered';
CREATE INDEX consumed ON rollouts (consumer, has_payload, step) WHERE state = 'consumed';
CREATE INDEX ended ON rollouts (state, changed_at) WHERE {ENDED};
CREATE INDEX deliveries ON rollouts (delivery_id) WHERE delivery_id IS NOT NULL;
CREATE INDEX deadlines ON rollouts (deadline) WHERE {PENDING};
CREATE TABLE payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE events (
    rollout INTEGER NOT NULL,
    number INTEGER NOT NULL,
    event TEXT NOT NULL,
    detail TEXT,
    at REAL NOT NULL,
    PRIMARY KEY (rollout, number)
) WITHOUT ROWID;
CREATE TABLE tallies (
    state TEXT NOT NULL,
    consumer TEXT NOT NULL,
    num_groups INTEGER NOT NULL,
    trajectories INTEGER NOT NULL,
    PRIMARY KEY (state, consumer)
) WITHOUT ROWID;
CREATE INDEX waiting ON tallies (consumer) WHERE state = 'queued' AND num_groups > 0;
CREATE TABLE forgotten (
    state TEXT PRIMARY KEY,
    trajectories INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID
"""
"""`consumer = ''` in `tallies` is the sum over all. `numbers` holds the revision, and what the logs
of forgotten rollouts amounted to. `report` is the event that a lease's own owner ended it with."""

RECOUNT = """
INSERT INTO tallies
    SELECT state, consumer, count(*), sum(size) FROM rollouts GROUP BY state, consumer
    UNION ALL SELECT state, '', count(*), sum(size) FROM rollouts GROUP BY state
"""

OF_RELEASE_0 = """
INSERT INTO rollouts (
    seq, id, consumer, request, size, priority, min_version, state, num_events, attempt, fence,
    report, owner, expires, admitted, oldest_version, staleness, reason, delivery_id, step,
    has_payload, submitted_at, since, changed_at
)
    SELECT seq, id, consumer, request, size, 0, 0, state,
        (SELECT count(*) FROM events_0 WHERE events_0.id = rollouts_0.id), attempt, attempt, NULL,
        '', 0, 0, oldest_version, staleness, reason, delivery_id, step, payload IS NOT NULL,
        (SELECT coalesce(min(at), 0) FROM events_0 WHERE events_0.id = rollouts_0.id),
        (SELECT coalesce(min(at), 0) FROM events_0 WHERE events_0.id = rollouts_0.id),
        (SELECT coalesce(max(at), 0) FROM events_0 WHERE events_0.id = rollouts_0.id)
    FROM rollouts_0;
INSERT INTO payloads SELECT seq, payload FROM rollouts_0 WHERE payload IS NOT NULL;
INSERT INTO events
    SELECT rollouts.seq, row_number() OVER (PARTITION BY events_0.id ORDER BY events_0.seq),
        event, detail, at
    FROM events_0 JOIN rollouts ON rollouts.id = events_0.id;
INSERT INTO notes SELECT key, value FROM notes_0
"""

OLD_TABLES = ("rollouts", "events", "notes")


def prepare(db: sqlite3.Connection, path: str) -> None:
    """Create the tables, or bring older ones up to date; within the caller's transaction.

    Raises:
        ConfigError: the file is of a newer release, or holds something else.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if version > VERSION:
        raise ConfigError(
            f"ledger {path} has schema {version}, this release reads {VERSION} and older: "
            "use the release that wrote it, or name another file"
        )
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    names.discard("sqlite_sequence")
    if names and not names.issuperset(OLD_TABLES):
        raise ConfigError(
            f"{path} is a database of something else (tables {sorted(names)}); name another file"
        )
    if version == 1:
        _run(db, IN_LINE)
    elif names:
        _migrate(db)
    else:
        _run(db, TABLES)
    db.execute(f"PRAGMA user_version = {VERSION}")


def _run(db: sqlite3.Connection, statements: str) -> None:
    # Not executescript: it would commit first.
    for statement in statements.split(";"):
        db.execute(statement)


def _migrate(db: sqlite3.Connection) -> None:
    for index in ("rollouts_by_state", "rollouts_by_delivery"):
        db.execute(f"DROP INDEX IF EXISTS {index}")
    for table in OLD_TABLES:
        db.execute(f"ALTER TABLE {table} RENAME TO {table}_0")
    db.execute("CREATE INDEX events_0_by_id ON events_0 (id, at)")
    _run(db, TABLES)
    _run(db, OF_RELEASE_0)
    for table in OLD_TABLES:
        db.execute(f"DROP TABLE {table}_0")
    _run(db, RECOUNT)
