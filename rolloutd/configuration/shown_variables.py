"""Variables as people see them: values of allowed names, keyed digests of all others.

A secret may have any name, so a name is shown only if the settings or the plan allow it.  Equal values
have equal digests, so a changed value is seen.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from rolloutd.audit.audit_chain import canonical_json
from rolloutd.configuration.secret_variables import map_secrets
from rolloutd.planfile import variables_of_plan
from rolloutd.ports import JSON

DIGEST_PREFIX = "secret:"
"""Begins what stands for a value that is not shown."""

SHORT_CHARS = 3
"""Characters of values that occur in other words, such as a number."""

CUT_MARKS = ("…", "...", "`")
"""What stands where an adapter has cut a text, if it is not the end: a sign, or the end of quotes."""

_DIGEST = re.compile(f"{DIGEST_PREFIX}[0-9a-f]{{16}}")


class _Digest(str):
    """A digest of this call, which is not hashed again."""

    __slots__ = ()


def is_shown(name: str, allowed: Iterable[str]) -> bool:
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


def texts_of_hidden(filled: Mapping[str, str], variables: Mapping[str, JSON]) -> dict[str, str]:
    """Return the template for each form of a text that has a hidden variable.

    `filled` maps filled templates to the templates; `variables` are the hidden ones that these name.
    """
    values = {
        text: f"{{{{ vars.{name} }}}}" for name, value in variables.items() for text in _texts_in(value)
    }
    # As it is, in a command, in quotes of an error, and in a URL.
    return {
        form: template
        for text, template in {**values, **filled}.items()
        for form in (text, shlex.quote(text), repr(text)[1:-1], quote(text, safe=""))
        if form
    }


def hide_in_text(text: str, hidden: Mapping[str, str]) -> str:
    """Return the text with templates in place of the texts that have hidden variables."""
    if not hidden:
        return text
    longest_first = sorted(hidden, key=len, reverse=True)
    patterns = (
        # A short value is replaced as a word only, or it would be found in other words.
        re.escape(each) if len(each) > SHORT_CHARS else rf"(?<!\w){re.escape(each)}(?!\w)"
        for each in longest_first
    )
    text = re.sub("|".join(patterns), lambda found: hidden[found.group()], text)
    return _hide_cut_texts(text, hidden)


def hide_values(text: str, variables: Mapping[str, JSON], allowed: Collection[str]) -> str:
    """Return a text, such as a task's diff, without the values of variables that are not allowed."""
    hidden = {name: value for name, value in variables.items() if not is_shown(name, allowed)}
    return hide_in_text(text, texts_of_hidden({}, hidden)) if hidden and text else text


def _hide_cut_texts(text: str, hidden: Mapping[str, str]) -> str:
    """Return the text without the beginnings of hidden texts that an adapter has cut."""
    for mark in CUT_MARKS:
        head, *rest = text.split(mark)
        for part in rest:
            head = _without_beginning(head, hidden) + mark + part
        text = head
    return _without_beginning(text, hidden)


def _without_beginning(head: str, hidden: Mapping[str, str]) -> str:
    for whole, template in hidden.items():
        for length in range(len(whole) - 1, SHORT_CHARS, -1):
            if head.endswith(whole[:length]):
                return head[:-length] + template
    return head


def _texts_in(value: JSON) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)
    elif len(str(value)) > SHORT_CHARS:
        yield str(value)


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
