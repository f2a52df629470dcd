"""Statements of the store as PostgreSQL reads them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rolloutd.store import open_store, retention_queries
from rolloutd.store.postgresql.connection import Address, PostgresqlConnection, translate
from rolloutd.store.transfer import columns_of
from tests.contracts.store_backends import plan_of, rollout_opened, write
from tests.support.postgresql import OWNER, Postgresql


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT ? FROM a WHERE b = '?' AND c = ?", ("SELECT $1 FROM a WHERE b = '?' AND c = $2", (0, 1))),
        ("SELECT ?2, ?1, ?2", ("SELECT $1, $2, $1", (1, 0))),
        ("SELECT :node, x::json, :node", ("SELECT $1, x::json, $1", ("node",))),
        ("DELETE FROM freeze WHERE id = 'freeze'", ("DELETE FROM \"freeze\" WHERE id = 'freeze'", ())),
        ("SELECT json_array(a)", ("SELECT json_build_array(a)", ())),
    ],
)  # fmt: skip
def test_statement_is_translated(statement: str, expected: tuple[str, Any]) -> None:
    assert translate(statement) == expected


LARGE_FLEET = 8_000

SMALL_COST = 1_000_000.0
"""In PostgreSQL's units: one page read in order is 1, one comparison 0.0025."""


@pytest.mark.servers("postgresql")
async def test_unused_documents_are_found_at_little_cost(tmp_path: Path, postgresql: Postgresql) -> None:
    """Each compared with all others, those of 100,000 nodes took longer than the lease, each day."""
    name = postgresql.emptied_database()
    store = await open_store(tmp_path, postgresql.address(name), compile_plan=plan_of)
    await write(store, rollout_opened("r"))
    await store.close()
    owner = Address(f"host={postgresql.directory} dbname={name} user={OWNER}")
    with closing(PostgresqlConnection(owner, {"work_mem": "64kB"})) as connection:
        columns = columns_of(connection, "target")
        changed = {"node": "'m' || g", "content": "repeat(md5(g::text), 2)"}
        values = ", ".join(changed.get(column, column) for column in columns)
        for filling in (
            f"target ({', '.join(columns)}) SELECT {values} FROM (SELECT * FROM target LIMIT 1) AS one,",
            "configuration SELECT repeat(md5(g::text), 2), '{}' FROM",
            "node_configuration (node) SELECT 'm' || g FROM",
        ):
            connection.execute(f"INSERT INTO {filling} generate_series(1, {LARGE_FLEET}) AS g")
        connection.execute("ANALYZE target, configuration, node_configuration")
        (plan,) = connection.execute(
            f"EXPLAIN (FORMAT json) {retention_queries._REMOVE_UNUSED_DOCUMENTS}"
        ).fetchone()
        assert json.loads(plan)[0]["Plan"]["Total Cost"] < SMALL_COST
