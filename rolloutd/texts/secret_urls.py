"""Passwords and tokens in URLs, recognised by place, name or form.

One rule for what plans refuse, what the database never has, and what an error leaves out.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_URL = re.compile(r"([a-z+]{0,16})://(\S*)", re.IGNORECASE)

_SCHEMES_WITHOUT_USERS = frozenset({"http", "https", "git", "git+http", "git+https"})
"""A user of these is mostly a token; a user of ssh is none, unless a password follows."""

_PORT = re.compile(r"(?:\d+|\{\{.*)(?:[/?#]|$)|[^@]*$", re.DOTALL)
"""What follows the colon of an authority without a password, which may itself have a slash."""

_SECRET_NAME = re.compile(
    r"token|passw|secret|api_?key|access_?key|signature|credential"
    r"|^(?:sig|auth|authorization|jwt|pass|pwd|pat|psk)$",
    re.IGNORECASE,
)

_TOKEN = re.compile(
    r"\b(?:gh[oprsu]_|github_pat_|gl(?:pat|cbt|dt|ft|ptt|rt|soat)-|xox[abeprs]-|dckr_pat_|npm_|hv[bs]\.|sk_live_)"
    r"[\w-]{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\bAIza[\w-]{35}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]"
)
"""Tokens of widespread services, keys of AWS and Google, and JWT."""


def has_secret(text: str) -> bool:
    """Return whether a URL, or a text with one, has a password or a token; also one in percent-encoding."""
    texts = (text, unquote(text)) if "%" in text else (text,)
    return any(_TOKEN.search(each) or any(map(_is_secret, _URL.finditer(each))) for each in texts)


def without_secret(url: str) -> str:
    """Return the URL without its user and password, and what follows its host if that has a secret."""
    bare = re.sub(r"(?<=://)[^/?#\s]*@", "", url)
    if not has_secret(bare):
        return bare
    scheme, _, rest = bare.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return f"{scheme}://..." if has_secret(f"{scheme}://{host}") or "@" in rest else f"{scheme}://{host}/..."


def _is_secret(url: re.Match[str]) -> bool:
    scheme, rest = url.groups()
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, has_user, _ = authority.rpartition("@")
    if has_user and (scheme.lower() in _SCHEMES_WITHOUT_USERS or ":" in user):
        return True
    host, has_port, port = rest.partition(":")
    if has_port and not re.search(r"[/?#@\[]", host) and not _PORT.match(port):
        return True
    for parameter in re.split(r"[?&;#]", rest)[1:]:
        name, _, value = parameter.partition("=")
        if value and not value.startswith("{{") and _SECRET_NAME.search(name):
            return True
    return False
