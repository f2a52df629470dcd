-- Variables of nodes had their passwords.  All are removed; the first answer of each inventory source brings
-- back those that may be stored.  Only what identifies a node stays, because names depend on it.
UPDATE node SET connection = json_patch(
    '{"rolloutd_withheld": true}',
    json_object(
        'provider_id', json_extract(connection, '$.provider_id'),
        'kubernetes_cluster', json_extract(connection, '$.kubernetes_cluster'),
        'kubernetes_node', json_extract(connection, '$.kubernetes_node')
    )
);
