"""Regular expressions from plans, matched in linear time.

Python's engine backtracks: `(a+)+$` against forty letters takes days, and no thread
can stop it.  RE2 does not, but has no backreferences or look-around.  It releases
the GIL while it searches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

MAX_SEARCHED_CHARS = 65_536
"""Characters of an output that are searched: the largest program needs 2 s for them."""

_MAX_PROGRAM_BYTES = 1 << 20
"""Memory of one compiled pattern: bounds how far `{1,1000}` within `{1,1000}` may expand."""


class InvalidPattern(ValueError):
    """A regular expression that RE2 does not accept."""


@lru_cache(maxsize=256)
def compile_pattern(text: str) -> Any:
    """Return the compiled regular expression; raises InvalidPattern."""
    import re2  # loaded only if a plan has a pattern

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_PROGRAM_BYTES
    try:
        return re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        raise InvalidPattern(reason.decode() if isinstance(reason, bytes) else str(reason)) from None


def is_found(pattern: str, text: str) -> bool:
    """Return whether the pattern occurs in the first MAX_SEARCHED_CHARS; raises InvalidPattern."""
    return compile_pattern(pattern).search(text[:MAX_SEARCHED_CHARS]) is not None
