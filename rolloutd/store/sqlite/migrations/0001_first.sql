-- What rolloutd remembers.  Instants are epoch seconds (REAL), flags are 0 or 1,
-- values that SQL never looks into are canonical JSON (TEXT): actors, labels,
-- lists.  Every row is written together with the audit entry of its event.

-- Who may write: a daemon that opens the file raises the epoch, and a batch of
-- an older epoch is refused whole.
CREATE TABLE tenure (
    id     INTEGER PRIMARY KEY CHECK (id = 1),
    epoch  INTEGER NOT NULL,
    holder TEXT    NOT NULL,
    since  REAL    NOT NULL
) STRICT;
INSERT INTO tenure (id, epoch, holder, since) VALUES (1, 0, 'nobody', 0.0);

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- The chain: hash = sha256(hash of the entry before, entry).  All else is read
-- out of the hashed text, so that no column can say something the hash does not
-- cover.
CREATE TABLE audit (
    seq     INTEGER PRIMARY KEY,
    entry   TEXT NOT NULL,
    hash    TEXT NOT NULL,
    at      REAL GENERATED ALWAYS AS (json_extract(entry, '$.at')) VIRTUAL,
    actor   TEXT GENERATED ALWAYS AS (json_extract(entry, '$.actor.name')) VIRTUAL,
    event   TEXT GENERATED ALWAYS AS (json_extract(entry, '$.event')) VIRTUAL,
    rollout TEXT GENERATED ALWAYS AS (json_extract(entry, '$.rollout')) VIRTUAL,
    node    TEXT GENERATED ALWAYS AS (json_extract(entry, '$.node')) VIRTUAL
) STRICT;
CREATE INDEX audit_by_rollout ON audit (rollout) WHERE rollout IS NOT NULL;
CREATE INDEX audit_by_node ON audit (node) WHERE node IS NOT NULL;
CREATE INDEX audit_by_event ON audit (event);

-- `connection` may hold secrets of the inventory: it is never audited.
CREATE TABLE node (
    name       TEXT PRIMARY KEY,
    kind       TEXT NOT NULL,
    sources    TEXT NOT NULL,
    labels     TEXT NOT NULL,
    connection TEXT NOT NULL DEFAULT '{}',
    gone_at    REAL
) STRICT;

CREATE TABLE rollout (
    number          INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    name            TEXT NOT NULL,
    content         TEXT NOT NULL,
    source          TEXT NOT NULL,
    change_digest   TEXT NOT NULL,
    scope_digest    TEXT NOT NULL,
    policy_digest   TEXT NOT NULL,
    digest          TEXT NOT NULL,
    selector_digest TEXT NOT NULL,
    submitted_by    TEXT NOT NULL,
    submitted_at    REAL NOT NULL,
    approved_count  INTEGER NOT NULL,
    amendments      INTEGER NOT NULL DEFAULT 0,
    paused_by       TEXT,
    paused_reason   TEXT,
    paused_at       REAL,
    cancelled_by    TEXT,
    cancelled_reason TEXT,
    cancelled_at    REAL,
    ended_at        REAL,
    deleted_at      REAL
) STRICT;
CREATE INDEX rollout_by_content ON rollout (change_digest, selector_digest, policy_digest);

CREATE TABLE target (
    rollout       TEXT NOT NULL REFERENCES rollout (id),
    node          TEXT NOT NULL,
    team          TEXT,
    pools         TEXT NOT NULL,
    wave          TEXT NOT NULL,
    position      INTEGER NOT NULL,
    phase         TEXT NOT NULL
                  CHECK (phase IN ('pending', 'isolating', 'maintaining', 'verifying', 'done', 'failed')),
    outcome       TEXT,
    attempt       INTEGER NOT NULL,
    rolling_back  INTEGER NOT NULL CHECK (rolling_back IN (0, 1)),
    isolated      INTEGER NOT NULL CHECK (isolated IN (0, 1)),
    since         REAL NOT NULL,
    not_before    REAL NOT NULL,
    put_backs     INTEGER NOT NULL,
    last_text     TEXT NOT NULL,
    failure       TEXT,
    order_kind    TEXT,
    order_by      TEXT,
    ordered_at    REAL NOT NULL,
    joined        INTEGER NOT NULL CHECK (joined IN (0, 1)),
    needs_vote_of TEXT,
    maybe_current INTEGER NOT NULL CHECK (maybe_current IN (0, 1)),
    admitted_at   REAL NOT NULL,
    PRIMARY KEY (rollout, node),
    CHECK ((phase = 'done') = (outcome IS NOT NULL))
) STRICT, WITHOUT ROWID;

-- `attempt` is null for what is prepared while the node is still in service.
CREATE TABLE step (
    rollout      TEXT NOT NULL,
    node         TEXT NOT NULL,
    attempt      INTEGER,
    step         TEXT NOT NULL,
    action       TEXT NOT NULL,
    number       INTEGER NOT NULL,
    state        TEXT NOT NULL CHECK (state IN ('intended', 'ok', 'failed', 'busy', 'unknown')),
    began_at     REAL NOT NULL,
    at           REAL NOT NULL,
    stage        TEXT NOT NULL DEFAULT '',
    content_hash TEXT NOT NULL DEFAULT '',
    handle       TEXT NOT NULL DEFAULT '',
    prior        TEXT NOT NULL DEFAULT 'null',
    text         TEXT NOT NULL DEFAULT '',
    output       TEXT NOT NULL DEFAULT '',
    visible_to   TEXT,
    FOREIGN KEY (rollout, node) REFERENCES target (rollout, node)
) STRICT;
CREATE INDEX step_by_node ON step (node, action);
CREATE UNIQUE INDEX step_by_key ON step (rollout, node, ifnull(attempt, -1), step, action, number);

CREATE TABLE failure (
    number  INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL,
    id      TEXT NOT NULL,
    node    TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    step    TEXT NOT NULL,
    message TEXT NOT NULL,
    at      REAL NOT NULL,
    UNIQUE (rollout, id),
    FOREIGN KEY (rollout, node) REFERENCES target (rollout, node)
) STRICT;

CREATE TABLE vote (
    number           INTEGER PRIMARY KEY,
    id               TEXT NOT NULL UNIQUE,
    rollout          TEXT NOT NULL REFERENCES rollout (id),
    gate             TEXT NOT NULL,
    wave             TEXT NOT NULL,
    digest           TEXT NOT NULL,
    actor            TEXT NOT NULL,
    yes              INTEGER NOT NULL CHECK (yes IN (0, 1)),
    reason           TEXT NOT NULL,
    at               REAL NOT NULL,
    teams            TEXT NOT NULL,
    shown            TEXT NOT NULL,
    nodes            TEXT NOT NULL,
    more             INTEGER NOT NULL,
    until            REAL,
    withdrawn_at     REAL,
    withdrawn_by     TEXT,
    withdrawn_reason TEXT
) STRICT;
CREATE INDEX vote_by_rollout ON vote (rollout);

CREATE TABLE opened (
    number  INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL REFERENCES rollout (id),
    gate    TEXT NOT NULL,
    wave    TEXT NOT NULL,
    at      REAL NOT NULL,
    UNIQUE (rollout, gate, wave)
) STRICT;

CREATE TABLE hold (
    node   TEXT NOT NULL,
    source TEXT NOT NULL,
    id     TEXT NOT NULL,
    actor  TEXT NOT NULL,
    reason TEXT NOT NULL,
    at     REAL NOT NULL,
    until  REAL,
    PRIMARY KEY (node, source, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE freeze (
    id     TEXT PRIMARY KEY,
    scope  TEXT NOT NULL,
    reason TEXT NOT NULL,
    by     TEXT NOT NULL,
    at     REAL NOT NULL,
    until  REAL
) STRICT, WITHOUT ROWID;

-- Reserved: which change is known to be bad on which class of hosts.
CREATE TABLE verdicts (
    change_digest TEXT NOT NULL,
    host_class    TEXT NOT NULL,
    verdict       TEXT NOT NULL,
    evidence      TEXT NOT NULL,
    PRIMARY KEY (change_digest, host_class)
) STRICT, WITHOUT ROWID;

-- A service's signed vote may be used once: its identifier is kept.
CREATE TABLE spent_token (
    id       TEXT PRIMARY KEY,
    spent_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
