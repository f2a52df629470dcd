-- Time without a daemon that the deadline of the present phase leaves out.
ALTER TABLE target ADD COLUMN downtime_s REAL NOT NULL DEFAULT 0;
