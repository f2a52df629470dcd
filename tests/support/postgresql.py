"""A real PostgreSQL on a Unix socket: a cluster for each worker of a run, a database for each test."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from rolloutd.store import prepare_postgresql
from rolloutd.store.postgresql.connection import Address

ACCOUNT = "nobody"
"""Who runs the servers of a test run as root: PostgreSQL refuses root."""

OWNER, ROLE = "fleet_owner", "fleet_daemon"

START_LIMIT_S = 60.0

FAST: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "jit": "off", "max_connections": "60"}
"""Nothing here is lost when a process is killed: the kernel has its pages."""


def find_programs() -> Path | None:
    """Return the directory of the newest server's programs, None where there is none."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(found, key=lambda path: int(path.parent.name), default=None)


class Postgresql:
    """One server and its directory."""

    def __init__(self, directory: Path, *, prefix: Sequence[str] = (), **settings: str) -> None:
        """`prefix` is a command that starts it, such as one that enters a network namespace."""
        programs = find_programs()
        assert programs is not None, "no PostgreSQL: see .ci/packages"
        self.programs = programs
        self.directory = directory
        self.settings = {**FAST, **settings}
        self._prefix = prefix
        self._server: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._shared: str | None = None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def initialize(self) -> None:
        """Make an empty cluster with an owner of tables and a daemon's role."""
        self.directory.chmod(0o755)
        self.data.mkdir()
        _give_away(self.directory)
        _give_away(self.data)
        self.run(
            "initdb", "-D", self.data, "--username=postgres", "--locale=C", "--encoding=UTF8", "--auth=trust",
            "--no-sync",
        )  # fmt: skip

    def copy_of(self, primary: Postgresql) -> None:
        """Become a standby server of a running one."""
        self.directory.chmod(0o755)
        _give_away(self.directory)
        source = f"host={primary.directory} user=postgres"
        self.run("pg_basebackup", "-D", self.data, "-d", source, "-R", "-X", "stream", "--checkpoint=fast")

    def promote(self) -> None:
        self.run("pg_ctl", "promote", "-D", self.data, "-w")

    def start(self) -> None:
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.directory),
            **self.settings,
        }
        arguments = [argument for name, value in options.items() for argument in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *self._prefix,
                    # It ends with this process, however that ends.
                    *("setpriv", *_account_options(), "--pdeathsig", "QUIT"),
                    *(self.programs / "postgres", "-D", self.data, *arguments),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.directory,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError:
                assert self._server.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.02)

    def stop(self, how: int = signal.SIGQUIT) -> None:
        """End it; SIGQUIT is an immediate stop, SIGINT a fast one."""
        if self._server is not None:
            self._server.send_signal(signal.SIGCONT)
            self._server.send_signal(how)
            self._server.wait(START_LIMIT_S)
            self._server = None

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def run(self, program: str, *arguments: Any) -> None:
        """Run one of PostgreSQL's programs as the server's account."""
        done = subprocess.run(
            [self.programs / program, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=self.directory,
            check=False,
            **_account(),
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def dsn(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"host={self.directory} dbname={database} user={user}"

    def connect(self, database: str = "postgres", user: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn(database, user), autocommit=True)

    def make_template(self) -> None:
        """Make the roles, and a prepared database that others are copies of."""
        with self.connect() as admin:
            admin.execute(f"CREATE ROLE {OWNER} LOGIN")
            admin.execute(f"CREATE ROLE {ROLE} LOGIN")
            admin.execute(f"CREATE DATABASE prepared OWNER {OWNER}")
        prepare_postgresql(self.dsn("prepared", OWNER), None, ROLE)

    def make_database(self, template: str = "prepared") -> str:
        name = f"test_{next(self._numbers)}"
        with self.connect() as admin:
            admin.execute(f"CREATE DATABASE {name} OWNER {OWNER} TEMPLATE {template}")
        if template == "prepared":
            with self.connect(name, OWNER) as owner:
                # It is no restored copy.
                owner.execute("DELETE FROM rolloutd.meta WHERE key = 'database'")
        return name

    def emptied_database(self) -> str:
        """Return the one database of most tests without rows, which takes a tenth of a new one's time."""
        if self._shared is None:
            self._shared = self.make_database()
            return self._shared
        with self.connect(self._shared) as admin:
            tables = admin.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'rolloutd'")
            admin.execute(
                "; ".join(
                    [
                        # Without triggers and foreign keys.
                        "BEGIN",
                        "SET LOCAL search_path = rolloutd",
                        "ALTER TABLE audit DISABLE TRIGGER refuse_change",
                        "SET LOCAL session_replication_role = replica",
                        *(
                            f'DELETE FROM "{name}"'
                            for (name,) in tables
                            if name not in ("term", "lease", "meta")
                        ),
                        "DELETE FROM meta WHERE key <> 'schema'",
                        "UPDATE term SET epoch = 0",
                        "UPDATE lease SET holder = ''",
                        "ALTER TABLE audit ENABLE ALWAYS TRIGGER refuse_change",
                        "COMMIT",
                    ]
                )
            )
        return self._shared

    def drop_database(self, name: str) -> None:
        with self.connect() as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def address(self, database: str, lease_s: float = 15.0) -> Address:
        return Address(self.dsn(database, ROLE), lease_s=lease_s)


@contextmanager
def running_server(parent: Path | None = None, **settings: str) -> Iterator[Postgresql]:
    """A server with a prepared template; it and its files are gone afterwards."""
    # Below /tmp: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="pg", dir=parent or "/tmp"))
    server = Postgresql(directory, **settings)
    try:
        server.initialize()
        server.start()
        server.make_template()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory)


def _account() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    return {"user": ACCOUNT, "group": pwd.getpwnam(ACCOUNT).pw_gid, "extra_groups": ()}


def _account_options() -> list[str]:
    account = _account()
    return [f"--reuid={account['user']}", f"--regid={account['group']}", "--clear-groups"] if account else []


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        account = pwd.getpwnam(ACCOUNT)
        os.chown(path, account.pw_uid, account.pw_gid)
