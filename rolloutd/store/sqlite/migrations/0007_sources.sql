-- What the inventory sources contradict each other in, and the host key and machine id pinned for each name.
ALTER TABLE node ADD COLUMN conflicts TEXT NOT NULL DEFAULT '[]';
ALTER TABLE node ADD COLUMN identity TEXT NOT NULL DEFAULT '{}';

-- The last answer of each inventory source, which counts while the source does not answer.
CREATE TABLE source (
    name        TEXT PRIMARY KEY,
    answered_at REAL NOT NULL
) STRICT;

CREATE TABLE source_node (
    source     TEXT NOT NULL,
    name       TEXT NOT NULL,
    kind       TEXT NOT NULL,
    labels     TEXT NOT NULL,
    connection TEXT NOT NULL,
    PRIMARY KEY (source, name)
) STRICT;
