-- The base of the audit: its last entry that was exported, and what the entries up to it made of the tables, in
-- compressed parts (see store/audit_base.py).  A replay of the audit begins there.
CREATE TABLE audit_base (
    seq       INTEGER PRIMARY KEY,
    head      TEXT NOT NULL,
    origin    TEXT NOT NULL,
    made_at   REAL NOT NULL,
    digest    TEXT NOT NULL,
    signature TEXT NOT NULL
) STRICT;
CREATE TABLE audit_base_part (
    seq     INTEGER NOT NULL,
    number  INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (seq, number)
) STRICT;
