-- How long the run of a step waited for a slot of the runner, so that its duration is known without it.
ALTER TABLE step ADD COLUMN waited_s REAL NOT NULL DEFAULT 0;
