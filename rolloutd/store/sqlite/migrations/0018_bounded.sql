-- What the retention asks for: the nodes of a target in later rollouts of the same plan.
CREATE INDEX target_by_node ON target (node);
CREATE INDEX rollout_by_name ON rollout (name, number);

-- The output of steps goes when its time is over.
CREATE INDEX step_with_output ON step (rollout) WHERE output != '';
