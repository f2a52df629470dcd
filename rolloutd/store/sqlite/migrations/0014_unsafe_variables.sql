-- Texts of other sources than Ansible's are stored as no templates now.  A node of such a source waits until
-- it is reported again: its stored variables may have a template that somebody else wrote.
UPDATE node SET connection = json_set(connection, '$.rolloutd_withheld', json('true'))
WHERE EXISTS (SELECT 1 FROM json_each(node.sources) WHERE value NOT LIKE 'ansible:%');
