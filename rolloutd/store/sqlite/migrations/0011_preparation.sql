-- How far each node is prepared: one row for each stage; a build has no node.
CREATE TABLE preparation (
    rollout     TEXT NOT NULL REFERENCES rollout (id),
    node        TEXT NOT NULL,
    stage       TEXT NOT NULL,
    attempt     INTEGER NOT NULL,
    state       TEXT NOT NULL,
    content     TEXT NOT NULL,
    at          REAL NOT NULL,
    began_at    REAL NOT NULL,
    bytes       INTEGER NOT NULL,
    text        TEXT NOT NULL,
    handle      TEXT NOT NULL,
    before      TEXT,
    not_before  REAL NOT NULL,
    PRIMARY KEY (rollout, node, stage)
) STRICT;

-- The manifests that build stages made.
CREATE TABLE built_manifest (
    rollout     TEXT NOT NULL REFERENCES rollout (id),
    stage       TEXT NOT NULL,
    manifest    TEXT NOT NULL,
    at          REAL NOT NULL,
    PRIMARY KEY (rollout, stage)
) STRICT;
