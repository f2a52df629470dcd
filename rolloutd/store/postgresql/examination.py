"""What `doctor` says of a PostgreSQL database: server, role, replication, clock, latency."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from statistics import median

from psycopg.conninfo import conninfo_to_dict

from rolloutd.errors import StoreFailed
from rolloutd.ports import PostgresqlAddress
from rolloutd.store.postgresql.connection import ERRORS, SCHEMA, PostgresqlConnection

TESTED_VERSIONS = (15, 16, 17)

MAX_SKEW_S = 2.0
"""Difference of clocks from which an entry's instants are confusing; nothing depends on it."""

MAX_LATENCY_S = 0.02
"""A round trip; a commit takes some six."""

ROUND_TRIPS = 5

Check = tuple[str, bool, str]

# The owner of a schema may drop its tables, and the owner of a database may drop all of it.
_ROLE = """
SELECT current_user,
    rolsuper OR EXISTS (
        SELECT FROM (
            SELECT relowner FROM pg_class WHERE relnamespace = nsp.oid AND relname = 'audit'
            UNION SELECT nspowner UNION SELECT datdba FROM pg_database WHERE datname = current_database()
        ) AS owners (owner)
        WHERE pg_has_role(current_user, owner, 'MEMBER')
    ),
    has_table_privilege('audit', 'UPDATE, DELETE, TRUNCATE')
FROM pg_roles, pg_namespace AS nsp WHERE rolname = current_user AND nspname = ?"""


def examine(address: PostgresqlAddress) -> Iterator[Check]:
    """Yield the checks; raises StoreFailed."""
    try:
        with closing(PostgresqlConnection(address, {"statement_timeout": 10_000})) as connection:
            yield _server(connection)
            yield _role(connection)
            yield _encryption(connection, address)
            yield _replication(connection)
            yield _clock_and_latency(connection)
    except ERRORS as error:
        raise StoreFailed(f"database: it cannot be examined ({str(error).strip()}); check its log") from error


def _server(connection: PostgresqlConnection) -> Check:
    info = connection.raw.info
    version = info.parameter_status("server_version") or ""
    major = info.server_version // 10_000
    if major in TESTED_VERSIONS:
        return "postgresql", True, f"version {version}"
    return "postgresql", True, f"version {version}; tested are {', '.join(map(str, TESTED_VERSIONS))}"


def _role(connection: PostgresqlConnection) -> Check:
    row = connection.execute(_ROLE, (SCHEMA,)).fetchone()
    role, is_owner, may_change = row or ("", False, False)
    if is_owner or may_change:
        text = f"{role} may alter or drop the audit; let `store prepare` grant a role that owns nothing"
        return "postgresql role", False, text
    return "postgresql role", True, f"{role} may append to the audit, and neither alter nor remove entries"


def _encryption(connection: PostgresqlConnection, address: PostgresqlAddress) -> Check:
    host = connection.raw.info.host
    if host.startswith("/") or host in ("localhost", "127.0.0.1", "::1"):
        return "postgresql TLS", True, "not needed on this machine"
    mode = conninfo_to_dict(address.dsn).get("sslmode", "verify-full")
    if mode == "verify-full":
        return "postgresql TLS", True, "the server proves its name"
    return "postgresql TLS", False, f"sslmode={mode} accepts any server; leave it out, name sslrootcert"


def _replication(connection: PostgresqlConnection) -> Check:
    (standbys,) = connection.execute("SELECT count(*) FROM pg_stat_replication").fetchone() or (0,)
    (names,) = connection.execute("SHOW synchronous_standby_names").fetchone() or ("",)
    (commit,) = connection.execute("SHOW synchronous_commit").fetchone() or ("",)
    if not standbys:
        return "postgresql replication", True, "no standby server; a lost disk loses what no backup has"
    # An ordinary role cannot see which server is synchronous; with names, a commit waits until one is.
    if not names or commit in ("off", "local"):
        text = "asynchronous: a promoted standby may lack acknowledged votes; set synchronous_standby_names"
        return "postgresql replication", False, text
    return "postgresql replication", True, f"synchronous now ({names}), standby servers: {standbys}"


def _clock_and_latency(connection: PostgresqlConnection) -> Check:
    trips, skews = [], []
    sql = "SELECT extract(epoch FROM clock_timestamp())::float8"
    for _ in range(ROUND_TRIPS):
        began, before = time.monotonic(), time.time()
        (there,) = connection.execute(sql).fetchone() or (0,)
        trip_s = time.monotonic() - began
        trips.append(trip_s)
        skews.append(there - before - trip_s / 2)
    trip_s, skew_s = median(trips), median(skews)
    text = f"a round trip takes {trip_s * 1000:.1f} ms, the clocks differ by {abs(skew_s):.1f} s"
    if trip_s > MAX_LATENCY_S:
        return "postgresql latency", False, f"{text}; bring both closer, each commit takes some six"
    if abs(skew_s) > MAX_SKEW_S:
        return "postgresql latency", False, f"{text}; synchronise both machines' clocks"
    return "postgresql latency", True, text
