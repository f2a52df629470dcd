-- People's approvals of the reboots that machines ask for themselves.
CREATE TABLE reboot_approval (
    id            TEXT PRIMARY KEY,
    machine_group TEXT NOT NULL,
    actor         TEXT NOT NULL,
    teams         TEXT NOT NULL,
    reason        TEXT NOT NULL,
    at            REAL NOT NULL,
    until         REAL NOT NULL
) STRICT, WITHOUT ROWID;
