-- The condition in words that PostgreSQL understands too: a flag is a number there.
DROP INDEX target_unfinished;
CREATE INDEX target_unfinished ON target (rollout)
WHERE phase NOT IN ('pending', 'done') OR isolated != 0 OR order_kind IS NOT NULL;
