-- Contents that failed on a class of hosts, with the evidence, until a person clears them or they pass.
DROP TABLE verdicts;
CREATE TABLE verdicts (
    id             TEXT PRIMARY KEY,
    change_digest  TEXT NOT NULL,
    content        TEXT NOT NULL,
    host_class     TEXT NOT NULL,
    rollout        TEXT NOT NULL,
    node           TEXT NOT NULL,
    step           TEXT NOT NULL,
    text           TEXT NOT NULL,
    at             REAL NOT NULL,
    cleared_at     REAL,
    cleared_by     TEXT,
    cleared_reason TEXT
) STRICT;
CREATE INDEX verdicts_by_node ON verdicts (node);
ALTER TABLE step ADD COLUMN code TEXT NOT NULL DEFAULT 'failed';
ALTER TABLE rollout ADD COLUMN overrides TEXT NOT NULL DEFAULT '[]';
ALTER TABLE rollout ADD COLUMN override_reason TEXT NOT NULL DEFAULT '';
