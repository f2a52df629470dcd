-- What runs give to nodes, without secrets, by the hash of the document; and the records of each node, as JSON.
CREATE TABLE configuration (
    content  TEXT PRIMARY KEY,
    document TEXT NOT NULL
) STRICT;
CREATE TABLE node_configuration (
    node     TEXT PRIMARY KEY,
    current  TEXT,
    previous TEXT,
    invalid  TEXT
) STRICT;
ALTER TABLE target ADD COLUMN content TEXT NOT NULL DEFAULT '';
ALTER TABLE step DROP COLUMN content_hash;
