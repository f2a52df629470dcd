"""What HTTP APIs of JSON with a bearer token have in common: the token's file and the text of a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from rolloutd.ports import JSON

MAX_TOKEN_BYTES = 4096
"""Limit of a token file: tokens have 30 to 57 characters, one of a gateway a few hundred."""

MAX_DETAIL_LENGTH = 200
"""Limit of a quoted error of the server."""

_TOKEN = re.compile(r"[!-~]+", re.ASCII)


def read_token(file: Path, error: Callable[[str, str], Exception]) -> str:
    """Return the token of a file; raises `error(problem, remedy)` unless it holds one."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as cause:
        problem = cause.strerror if isinstance(cause, OSError) else "not ASCII"
        raise error(f"{file} cannot be read ({problem})", "set `token_file`") from None
    if not _TOKEN.fullmatch(text):
        raise error(f"{file} does not hold one token", "write the bare token into it")
    return text


def describe_refusal(body: JSON, key: str, token: str) -> str:
    """Return in parentheses what the server says under `detail`, `key` or by field, without the token."""
    if not isinstance(body, dict) or not body:
        return ""
    text = next((each for each in (body.get("detail"), body.get(key)) if isinstance(each, str)), None)
    if text is None:
        text = "; ".join(f"{name}: {_first(problems)}" for name, problems in body.items())
    return f" ({' '.join(text.replace(token, '***')[:MAX_DETAIL_LENGTH].rstrip('.').split())})"


def _first(problems: JSON) -> str:
    return str(problems[0] if isinstance(problems, list) and problems else problems)
