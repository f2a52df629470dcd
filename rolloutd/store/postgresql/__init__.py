"""PostgreSQL: what the store needs of this database alone."""
