-- Names of the field in place of rolloutd 0.1's own.  Audit entries keep theirs, because the
-- chain's hashes cover them; rolloutd/audit_names.py translates them for readers.

ALTER TABLE tenure RENAME TO term;
ALTER TABLE target RENAME COLUMN put_backs TO aborted_isolations;

UPDATE step SET action = CASE action
    WHEN 'look' THEN 'inspect'
    WHEN 'do' THEN 'apply'
    WHEN 'undo' THEN 'revert'
    WHEN 'clear' THEN 'clean-up'
    ELSE action
END;
