-- What a rollout's pilot showed; the votes at the start gate are for its digest.
CREATE TABLE pilot_evidence (
    rollout     TEXT PRIMARY KEY REFERENCES rollout (id),
    content     TEXT NOT NULL,
    digest      TEXT NOT NULL,
    pilot_since REAL NOT NULL,
    at          REAL NOT NULL
) STRICT;
