-- The source's own id of a node, and what contradicts the source's answer before.
ALTER TABLE source_node ADD COLUMN id TEXT NOT NULL DEFAULT '';
ALTER TABLE source_node ADD COLUMN conflicts TEXT NOT NULL DEFAULT '{}';
