-- A stage's row is written several times, the snapshot of its node once: so it has a table of its own.
CREATE TABLE preparation_snapshot (
    rollout     TEXT NOT NULL,
    node        TEXT NOT NULL,
    stage       TEXT NOT NULL,
    before      TEXT NOT NULL,
    PRIMARY KEY (rollout, node, stage),
    FOREIGN KEY (rollout, node, stage) REFERENCES preparation (rollout, node, stage) ON DELETE CASCADE
) STRICT;
INSERT INTO preparation_snapshot (rollout, node, stage, before)
SELECT rollout, node, stage, before FROM preparation WHERE before IS NOT NULL;
ALTER TABLE preparation DROP COLUMN before;

-- Each stage with a playbook asks for its node's lost runs.
CREATE INDEX preparation_lost_run ON preparation (node) WHERE handle != '' AND state = 'failed';
CREATE INDEX preparation_running ON preparation (rollout, node) WHERE state = 'running';
