-- Forecasts that people have seen, so that they can be compared with what came.  The audit has no entry of them.
CREATE TABLE forecast (
    rollout     TEXT NOT NULL REFERENCES rollout (id),
    made_at     REAL NOT NULL,
    occasion    TEXT NOT NULL,
    answer      TEXT NOT NULL,
    is_missed   INTEGER NOT NULL DEFAULT 0 CHECK (is_missed IN (0, 1)),
    PRIMARY KEY (rollout, made_at)
) STRICT;
