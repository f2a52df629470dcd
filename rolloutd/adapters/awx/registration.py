"""Registration of the AWX runner."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from rolloutd.plugin import ABSENT, Field, FilePath, Params, PositiveDuration, Registration, duration_field
from rolloutd.plugin.field_types import MAX_ITEMS, InvalidValue

_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _require_origin(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/") or set("/@?# ") & set(rest.rstrip("/")):
        raise InvalidValue("this is not the address of an AWX", "https://HOST[:PORT]; the path is `prefix`")
    return text.rstrip("/")


def _require_prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text):
        raise InvalidValue("this is not the path of an API", "a path such as /api/v2 or /api/controller/v2")
    return text


def _require_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise InvalidValue("this is not the name of a variable", "letters, digits and _")
    return name


Name = Annotated[str, Field(min_length=1, max_length=512)]


class AwxParams(Params):
    """Job templates of an AWX run the playbooks, one job for each run."""

    url: Annotated[str, AfterValidator(_require_origin)] = Field(
        description="Address of AWX, without a path and a password."
    )
    prefix: Annotated[str, AfterValidator(_require_prefix)] = Field(
        default="/api/v2", description="Path of its API; behind a platform gateway /api/controller/v2."
    )
    token_file: FilePath = Field(
        description="File with a token of the service user, scope `write`; it is read for each request."
    )
    ca_file: FilePath = Field(default=ABSENT, description="Certificates of the authorities of `url`.")
    organization: Name = Field(
        description="Organization of AWX in which the runs' inventories are created; for rolloutd alone."
    )
    projects: Annotated[dict[str, Name], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        description="Projects of AWX by the git URL that plans name as their source."
    )
    credential_variables: list[Annotated[str, AfterValidator(_require_variable)]] = Field(
        default=[],
        max_length=MAX_ITEMS,
        description="Secret variables of nodes that credentials of AWX supply; they are not sent.",
    )

    late_launch: PositiveDuration = duration_field(
        "130s",
        "Time in which AWX may still begin a launch that it has not answered: its web server's own limit of"
        " a request, 115 s if it was not changed, and a margin.",
    )
    late_events: PositiveDuration = duration_field(
        "75s",
        "Time after the end of a job in which its last events may come, and its status may turn.",
    )


RUNNER = Registration("rolloutd.adapters.awx.runner:make_runner", AwxParams)
