-- What check mode would change again on a node that is done, and since when.
ALTER TABLE target ADD COLUMN drift_since REAL;
ALTER TABLE target ADD COLUMN drift_tasks TEXT NOT NULL DEFAULT '[]';
