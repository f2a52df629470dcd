-- People's approvals of the reboots that machines ask for themselves.
CREATE TABLE reboot_approval (
    id text COLLATE "C" PRIMARY KEY,
    machine_group text COLLATE "C" NOT NULL,
    actor text COLLATE "C" NOT NULL,
    teams text COLLATE "C" NOT NULL,
    reason text COLLATE "C" NOT NULL,
    at double precision NOT NULL,
    until double precision NOT NULL
);
