"""Variables as people see them: values of allowed names, keyed digests of all others.

A secret may have any name, so a name is shown only if the settings or the plan allow it.  Equal values
have equal digests, so a changed value is seen.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from rolloutd.audit_chain import canonical_json
from rolloutd.planfile import variables_of_plan
from rolloutd.ports import JSON
from rolloutd.secret_variables import map_secrets

DIGEST_PREFIX = "secret:"
"""Begins what stands for a value that is not shown."""

_DIGEST = re.compile(f"{DIGEST_PREFIX}[0-9a-f]{{16}}")


class _Digest(str):
    """A digest of this call, which is not hashed again."""

    __slots__ = ()


def is_shown(name: str, allowed: Iterable[str]) -> bool:
    """Return whether the globs allow to show a variable of this name."""
    return any(fnmatchcase(name, glob) for glob in allowed)


def hide(
    variables: Mapping[str, JSON],
    key: bytes,
    shows: Callable[[str], bool],
    marked: Collection[str] = (),
    *,
    has_digests: bool = False,
) -> dict[str, JSON]:
    """Return the variables with a digest for each value that is not shown, and for each known secret.

    `marked` are further names of secrets.  `has_digests`: digests of an earlier call stay as they are.
    """
    redacted: dict[str, JSON] = map_secrets(
        variables, lambda name, value: _digest(key, name, value, has_digests=has_digests), marked
    )
    return {
        name: value if shows(name) else _hide_value(key, name, value, has_digests=has_digests)
        for name, value in redacted.items()
    }


def shown_plan(content: Mapping[str, JSON], key: bytes, allowed: Collection[str]) -> dict[str, JSON]:
    """Return a plan's content with digests for the variables that neither `allowed` nor the plan shows."""
    globs = (*allowed, *content["spec"].get("show_vars", ()))
    return _hide_in_plan(content, key, lambda name: is_shown(name, globs))


def hidden_plan(content: Mapping[str, JSON], key: bytes) -> dict[str, JSON]:
    """Return a plan's content with digests for all its variables, to compare it with another."""
    return _hide_in_plan(content, key, lambda name: False)


def _hide_in_plan(content: Mapping[str, JSON], key: bytes, shows: Callable[[str], bool]) -> dict[str, JSON]:
    changed: Any = content
    for path, variables in variables_of_plan(content):
        changed = _with_value(changed, path, hide(variables, key, shows))
    return dict(changed)


def _with_value(content: Any, path: tuple[str | int, ...], value: JSON) -> Any:
    if not path:
        return value
    part, *rest = path
    copy: Any = list(content) if isinstance(part, int) else dict(content)
    copy[part] = _with_value(content[part], tuple(rest), value)
    return copy


def _hide_value(key: bytes, name: str, value: JSON, *, has_digests: bool) -> JSON:
    """Return the value with a digest for each part, so that a difference names the part."""
    if isinstance(value, Mapping):
        return {
            inner: _hide_value(key, inner, item, has_digests=has_digests) for inner, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide_value(key, name, item, has_digests=has_digests) for item in value]
    return value if isinstance(value, _Digest) else _digest(key, name, value, has_digests=has_digests)


def _digest(key: bytes, name: str, value: JSON, *, has_digests: bool) -> str:
    if has_digests and isinstance(value, str) and _DIGEST.fullmatch(value):
        return value
    return _Digest(_keyed_digest(key, f"{name}={canonical_json(value)}"))


@lru_cache(maxsize=65_536)  # most values of a fleet repeat; some 10 MiB
def _keyed_digest(key: bytes, text: str) -> str:
    digest = hmac.digest(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
    return DIGEST_PREFIX + digest.hex()[:16]
