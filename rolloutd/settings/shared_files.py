"""Settings of the files that daemons on other machines need too."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rolloutd.plugin import Params
from rolloutd.plugin.field_types import FilePath, HttpUrl, InvalidValue, OptionalPath

_BUCKET = r"^[a-z0-9][a-z0-9.-]+[a-z0-9]$"
_PREFIX = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*$"


class S3Files(Params):
    """A bucket of an S3-compatible server."""

    bucket: Annotated[str, Field(min_length=3, max_length=63, pattern=_BUCKET)] = Field(
        description="The bucket; the daemon does not create it."
    )
    endpoint: HttpUrl | None = Field(
        default=None,
        description="URL of the server, without the bucket; by default that of Amazon's region.",
    )
    region: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9-]+$")] = Field(
        default="us-east-1", description="Region that signatures name."
    )
    prefix: Annotated[str, Field(max_length=200, pattern=_PREFIX)] | None = Field(
        default=None, description="Begin of all keys, for a bucket that others use too."
    )
    credentials_file: FilePath = Field(
        description="`aws_access_key_id` and `aws_secret_access_key` below `[default]`, as AWS tools read"
        " it; read again when it changes."
    )
    ca_file: OptionalPath = Field(
        default=None, description="PEM certificates that are trusted too, besides this machine's."
    )


class SharedFiles(Params):
    """Files that a daemon on another machine needs too."""

    directory: OptionalPath = Field(
        default=None,
        description="A directory that the machines of all daemons mount; by default `state_dir`.",
    )
    s3: S3Files | None = Field(
        default=None, description="A bucket; `state_dir` has copies of what this machine uses."
    )

    @property
    def is_named(self) -> bool:
        """Whether the files are elsewhere than in the state directory alone."""
        return self.directory is not None or self.s3 is not None

    @model_validator(mode="after")
    def _require_one(self) -> SharedFiles:
        if self.directory is not None and self.s3 is not None:
            raise InvalidValue("the files are in one place", "`directory` or `s3`", at=("s3",))
        return self
