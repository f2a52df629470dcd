-- Variables of nodes are sealed now: they may be secrets under any name.  The plain ones are removed, and the first
-- answer of each inventory source brings them back.  What identifies a node stays, because names depend on it.
UPDATE node SET connection = json_patch(
    '{"rolloutd_withheld": true}',
    json_object(
        'provider_id', json_extract(connection, '$.provider_id'),
        'kubernetes_cluster', json_extract(connection, '$.kubernetes_cluster'),
        'kubernetes_node', json_extract(connection, '$.kubernetes_node')
    )
);
UPDATE source_node SET connection = json_patch(
    '{"rolloutd_withheld": true}',
    json_object(
        'provider_id', json_extract(connection, '$.provider_id'),
        'kubernetes_cluster', json_extract(connection, '$.kubernetes_cluster'),
        'kubernetes_node', json_extract(connection, '$.kubernetes_node')
    )
);
