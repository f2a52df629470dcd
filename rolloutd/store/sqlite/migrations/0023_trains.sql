-- Trains: rollouts that share the outage of a node.
CREATE TABLE train (
    name      TEXT PRIMARY KEY,
    rollouts  TEXT NOT NULL,
    wait_s    REAL NOT NULL,
    by        TEXT NOT NULL,
    at        REAL NOT NULL,
    approvals TEXT NOT NULL
) STRICT, WITHOUT ROWID;
