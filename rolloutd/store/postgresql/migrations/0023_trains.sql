-- Trains: rollouts that share the outage of a node.
CREATE TABLE train (
    name text COLLATE "C" PRIMARY KEY,
    rollouts text COLLATE "C" NOT NULL,
    wait_s double precision NOT NULL,
    by text COLLATE "C" NOT NULL,
    at double precision NOT NULL,
    approvals text COLLATE "C" NOT NULL
);
