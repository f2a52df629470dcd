"""What people call the content that a plan brings: a tag, a version, or the beginning of a hash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rolloutd.texts.formats import short_hash


class Version(NamedTuple):
    """A version as people say it, and the whole commit, digest or version behind it."""

    text: str
    pin: str


def version_of(content: Mapping[str, Any], source: Mapping[str, str]) -> Version:
    """Return what a stored plan brings: what its change names by `version` or `digest`, else its source."""
    return next(_named_by_changes(content), _version_of_source(source))


def _named_by_changes(content: Mapping[str, Any]) -> Iterator[Version]:
    for stage in content["spec"]["maintain"]:
        for key, params in stage.items():
            if key != "vars" and isinstance(params, Mapping):
                # A kind names its source itself, or has a section for it.
                for named in (params, *(each for each in params.values() if isinstance(each, Mapping))):
                    yield from _named(named)


def _named(params: Mapping[str, Any]) -> Iterator[Version]:
    version, digest = params.get("version"), params.get("digest")
    # A template differs for each node, so it is not one version.
    text = version if isinstance(version, str) and "{{" not in version else ""
    if isinstance(digest, str):
        yield Version(text or short_hash(digest.partition(":")[2]), digest)
    elif text:
        yield Version(text, text)


def _version_of_source(source: Mapping[str, str]) -> Version:
    pin = source["pin"]
    is_tag = source.get("ref_kind") == "tag"
    return Version(source["ref"] if is_tag else short_hash(pin), pin)
