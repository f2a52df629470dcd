-- What a start compares in place of the whole audit: sums of keyed hashes over rows (see store/row_digests.py),
-- and the signed record of the newest ones.
CREATE TABLE audit_checkpoint (
    id        INTEGER PRIMARY KEY CHECK (id = 1),
    content   TEXT NOT NULL,
    signature TEXT NOT NULL
) STRICT;
ALTER TABLE rollout ADD COLUMN rows_digest TEXT NOT NULL DEFAULT '';
ALTER TABLE target ADD COLUMN steps_digest TEXT NOT NULL DEFAULT '';

-- Which rollouts are live follows from few targets; each start and each pass of the retention asks.
CREATE INDEX target_unfinished ON target (rollout)
WHERE phase NOT IN ('pending', 'done') OR isolated OR order_kind IS NOT NULL;
