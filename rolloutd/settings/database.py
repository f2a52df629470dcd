"""Settings of where the database is."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rolloutd.plugin import Params, duration_field
from rolloutd.plugin.field_types import InvalidValue, OptionalPath, PositiveDuration

MIN_LEASE_S = 5.0
"""Below it, a restart of the database or a pause of a virtual machine costs the leadership."""


class PostgresqlStore(Params):
    """A PostgreSQL database (15 or newer) that `rolloutctl store prepare` has prepared."""

    dsn: Annotated[str, Field(min_length=1, max_length=2000)] = Field(
        description="Where it is and who connects, as libpq reads it: `host=db1,db2 dbname=rolloutd"
        " user=rolloutd`. Without `sslmode` it is `verify-full`; several hosts are tried in turn."
    )
    password_file: OptionalPath = Field(
        default=None, description="File with the role's password; only the daemon reads it."
    )
    lease_s: PositiveDuration = duration_field(
        "15s", "How long a leader that says nothing leads before a standby takes over.", alias="lease"
    )

    @model_validator(mode="after")
    def _require_usable(self) -> PostgresqlStore:
        # Imported only where the settings name it.
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict

        try:
            given = conninfo_to_dict(self.dsn)
        except ProgrammingError as error:
            text = " ".join(str(error).split())
            raise InvalidValue(text, "keywords and values, or a URL", at=("dsn",)) from error
        if "password" in given:
            raise InvalidValue("it has a password", "`password_file`", at=("dsn",), found="a secret")
        if self.lease_s < MIN_LEASE_S:
            raise InvalidValue("each pause would cost the leadership", "5s or more", at=("lease",))
        return self


class StoreSettings(Params):
    """The database; without a section it is a file in the state directory."""

    postgresql: PostgresqlStore | None = Field(default=None, description="A PostgreSQL database.")
