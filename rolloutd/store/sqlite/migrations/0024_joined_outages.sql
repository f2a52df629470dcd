-- Whether a node got the change in the outage of another rollout of its train.
ALTER TABLE target ADD COLUMN joined_outage INTEGER NOT NULL DEFAULT 0;
