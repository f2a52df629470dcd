-- What sort of failure it is; older failures have no other sort.
ALTER TABLE failure ADD COLUMN code TEXT NOT NULL DEFAULT 'failed';
