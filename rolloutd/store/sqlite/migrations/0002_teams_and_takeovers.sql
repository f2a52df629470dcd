-- What a team has set for itself, and which rollout another one took over from.

ALTER TABLE rollout ADD COLUMN supersedes TEXT;

-- `windows` is a list of {days, from, to, zone}: days from Monday = 0, minutes of the day.
CREATE TABLE team_rules (
    team     TEXT PRIMARY KEY,
    windows  TEXT NOT NULL,
    canaries TEXT NOT NULL,
    set_by   TEXT NOT NULL,
    at       REAL NOT NULL
) STRICT, WITHOUT ROWID;
