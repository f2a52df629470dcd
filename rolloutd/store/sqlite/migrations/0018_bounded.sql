-- What the retention asks for: later rollouts of the same plan, and steps that still have their output.
CREATE INDEX rollout_by_name ON rollout (name, number);
CREATE INDEX step_with_output ON step (rollout) WHERE output != '';
