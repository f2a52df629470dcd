"""The tables in PostgreSQL: who owns them, what the daemon's role may do with them, and their version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Final

from psycopg import sql

from rolloutd.errors import StoreFailed
from rolloutd.ports import PostgresqlAddress
from rolloutd.store.backend import EPOCH_INCREMENT, Connection, RowChange, row_text
from rolloutd.store.postgresql.connection import ERRORS, SCHEMA, PostgresqlConnection
from rolloutd.store.row_digests import digested_columns
from rolloutd.store.schema import KEYS, ROLLOUT_TABLES

FIRST_VERSION = 22
"""SQLite's migration whose tables the first file here has; from then on both lists have the same numbers."""

MIN_SERVER_VERSION = 150_000

SCHEMA_KEY = "schema"
"""Row of `meta` with the number of the last migration."""

DATABASE_KEY = "database"
"""Row of `meta` with the database that was prepared; a restored copy is in another one."""

_THIS_DATABASE = (
    "SELECT system_identifier::text || '.' || oid FROM pg_control_system(), pg_database"
    " WHERE datname = current_database()"
)
"""A promoted standby server has the same; its terms outrank the old ones by its timeline."""

PREPARE = "rolloutctl store prepare --dsn OWNER_DSN --role NAME"

_RIGHTS: Final[Mapping[str, str]] = {
    "audit": "SELECT, INSERT",
    "term": "SELECT, UPDATE",
    "lease": "SELECT, UPDATE",
}
"""What the daemon's role may do with a table, if it is not everything with its rows."""

_ALL_ROWS = "SELECT, INSERT, UPDATE, DELETE"

_FOLLOWING = "rolloutd.follows"
"""Setting of a session whose changed rows the triggers report to itself."""

_NOTE_ROW = """
CREATE OR REPLACE FUNCTION note_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('{following}', true) = 'on' THEN
        IF TG_OP <> 'INSERT' THEN
            INSERT INTO pg_temp.changed_row VALUES ('{table}', {old_rollout}, {old_node}, -1, {old_text});
        END IF;
        IF TG_OP <> 'DELETE' THEN
            INSERT INTO pg_temp.changed_row VALUES ('{table}', {new_rollout}, {new_node}, 1, {new_text});
        END IF;
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER note_row AFTER INSERT OR UPDATE OR DELETE ON {name}
    FOR EACH ROW EXECUTE FUNCTION note_{table}();
"""

_FOLLOW = f"""
SET {_FOLLOWING} = 'on';
CREATE TEMP TABLE IF NOT EXISTS changed_row (
    place text, rollout text, node text, sign smallint, content text) ON COMMIT DELETE ROWS;
"""


def prepare(owner: PostgresqlAddress, role: str) -> str:
    """Make or migrate the tables as their owner, and let a role use them; return what was done.

    Raises StoreFailed.
    """
    try:
        connection = PostgresqlConnection(owner, {"lock_timeout": 5_000, "client_min_messages": "warning"})
        try:
            connection.execute("BEGIN")
            # Two at once would both make the tables.
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('rolloutd'))")
            before, is_copy = _prepare(connection, role)
            connection.execute("COMMIT")
        finally:
            connection.close()
    except ERRORS as error:
        raise StoreFailed(f"database: not prepared, nothing was changed; {str(error).strip()}") from error
    newest = latest_version()
    what = "made" if before is None else "unchanged" if before == newest else f"migrated from {before}"
    if is_copy:
        what += ", a copy whose next terms outrank those since the backup"
    return f"schema {SCHEMA}: {what}, version {newest}; {role} may use it, and only append to the audit"


def _prepare(connection: PostgresqlConnection, role: str) -> tuple[int | None, bool]:
    """Return the version before, and whether the tables are a copy of another database's."""
    _require_server(connection)
    known = connection.execute(
        "SELECT rolsuper, pg_has_role(?, current_user, 'MEMBER') FROM pg_roles WHERE rolname = ?",
        (role, role),
    ).fetchone()
    if known is None:
        raise StoreFailed(f"role {role}: there is none; CREATE ROLE it with LOGIN first")
    if known[0] or known[1]:
        raise StoreFailed(f"role {role}: it could undo what protects the audit; name one that owns nothing")
    before = read_version(connection)
    if before is None:
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    elif before < latest_version():
        _require_no_daemon(connection, role)
    for number, script in migrations():
        if before is None or number > before:
            connection.raw.execute(script)
    origin, this = _databases(connection)
    is_copy = origin not in ("", this)
    if is_copy:
        # Nodes refuse the runs of an older term than they have seen, also of one that the copy lacks.
        connection.execute("UPDATE term SET epoch = epoch + ?", (EPOCH_INCREMENT,))
        connection.execute("UPDATE lease SET holder = ''")  # none leads the copy
    connection.executemany(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        [(SCHEMA_KEY, str(latest_version())), (DATABASE_KEY, this)],
    )
    for table in KEYS:
        connection.execute(_note_row(table, digested_columns(connection, table)))
    _grant(connection, role)
    return before, is_copy


def _require_no_daemon(connection: PostgresqlConnection, role: str) -> None:
    """Raise StoreFailed while a daemon is connected: an older one would write into newer tables."""
    session = connection.execute(
        "SELECT application_name, pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND usename = ? AND application_name LIKE 'rolloutd %'",
        (role,),
    ).fetchone()
    if session is not None:
        raise StoreFailed(
            f"database: {session[0]} is connected; stop all daemons, or end a dead one's session:"
            f" SELECT pg_terminate_backend({session[1]})"
        )


def _grant(connection: PostgresqlConnection, role: str) -> None:
    names = [
        name
        for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = ?", (SCHEMA,))
    ]
    to = sql.Identifier(role).as_string()
    (database,) = connection.execute("SELECT quote_ident(current_database())").fetchone() or ("",)
    statements = [
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {SCHEMA} FROM {to}, PUBLIC",
        f"REVOKE ALL ON SCHEMA {SCHEMA} FROM {to}, PUBLIC",
        f"GRANT USAGE ON SCHEMA {SCHEMA} TO {to}",
        # For the rows that it has changed itself.
        f"GRANT TEMPORARY ON DATABASE {database} TO {to}",
        *(f"GRANT {_RIGHTS.get(name, _ALL_ROWS)} ON {name} TO {to}" for name in names),
        # For a move, which brings the numbers of rows.
        f"GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA {SCHEMA} TO {to}",
    ]
    for statement in statements:
        connection.execute(statement)


def _note_row(table: str, columns: Sequence[str]) -> str:
    def scope(row: str) -> tuple[str, str]:
        rollout = f"{row}.rollout" if table in (*ROLLOUT_TABLES, "step") else "''"
        return rollout, f"{row}.node" if table == "step" else "''"

    (old_rollout, old_node), (new_rollout, new_node) = scope("OLD"), scope("NEW")
    if table == "rollout":
        new_node = "CASE WHEN TG_OP = 'INSERT' THEN NEW.id ELSE '' END"
    return _NOTE_ROW.format(
        table=table,
        # The connection's own translation does not look into the function's text.
        name=table,
        following=_FOLLOWING,
        old_rollout=old_rollout,
        old_node=old_node,
        old_text=row_text([f'OLD."{name}"' for name in columns]),
        new_rollout=new_rollout,
        new_node=new_node,
        new_text=row_text([f'NEW."{name}"' for name in columns]),
    )


class PostgresqlRowChanges:
    """The changed rows of one session (store.backend.RowChanges), which triggers write to its own table."""

    def __init__(self, connection: PostgresqlConnection) -> None:
        self._connection = connection
        connection.on_connect(lambda session: session.execute(_FOLLOW))

    def begin(self) -> None:
        """Do nothing: the end of a transaction has emptied the table."""

    def mark(self) -> int:
        return 0

    def forget_since(self, mark: int) -> None:
        """Do nothing: a rollback has removed them from the table too."""

    def take(self) -> list[RowChange]:
        return self._connection.execute(
            "DELETE FROM pg_temp.changed_row RETURNING place, rollout, node, sign, content"
        ).fetchall()


# -- the version ----------------------------------------------------------------


@cache
def migrations() -> Sequence[tuple[int, str]]:
    """Return the migrations and their numbers, oldest first."""
    directory = resources.files("rolloutd.store.postgresql") / "migrations"
    files = sorted((entry.name, entry) for entry in directory.iterdir() if entry.name.endswith(".sql"))
    return [(number, entry.read_text("utf-8")) for number, (_, entry) in enumerate(files, FIRST_VERSION)]


def latest_version() -> int:
    return migrations()[-1][0]


def read_version(connection: Connection) -> int | None:
    """Return the number of the last migration, None without tables."""
    if connection.execute(f"SELECT to_regclass('{SCHEMA}.meta')").fetchone()[0] is None:
        return None
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (SCHEMA_KEY,)).fetchone()
    return None if row is None else int(row[0])


def require_current(connection: PostgresqlConnection, name: str) -> None:
    """Raise StoreFailed for a database that this version cannot use, or that was moved."""
    _require_server(connection)
    version, newest = read_version(connection), latest_version()
    if version is None:
        raise StoreFailed(f"{name}: it is not prepared; run `{PREPARE}`")
    if version < newest:
        raise StoreFailed(f"{name}: its tables are of version {version}, not {newest}; run `{PREPARE}`")
    if version > newest:
        raise StoreFailed(
            f"{name}: a newer rolloutd has prepared it (version {version}, this one knows {newest});"
            " start that version"
        )


def require_original(connection: PostgresqlConnection, name: str) -> None:
    """Raise StoreFailed for a restored copy: its next term may be one that another daemon had."""
    origin, this = _databases(connection)
    if origin not in ("", this):
        raise StoreFailed(f"{name}: it is a copy of another database; run `{PREPARE}`, which raises its term")


def _databases(connection: PostgresqlConnection) -> tuple[str, str]:
    """Return the database that was prepared, "" if an older version did it, and this one."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (DATABASE_KEY,)).fetchone()
    (this,) = connection.execute(_THIS_DATABASE).fetchone() or ("",)
    return ("" if row is None else row[0]), this


def _require_server(connection: PostgresqlConnection) -> None:
    version = connection.raw.info.server_version
    if version < MIN_SERVER_VERSION:
        raise StoreFailed(f"PostgreSQL {version // 10_000} is too old: 15 or newer is needed")
    (encoding,) = connection.execute("SHOW server_encoding").fetchone() or ("",)
    if encoding != "UTF8":
        raise StoreFailed(f"database: its encoding is {encoding}; make it with ENCODING 'UTF8'")
