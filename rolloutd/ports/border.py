"""Where an adapter's surprises end: the daemon outlives whatever an adapter did not foresee.

Adapters raise RolloutdError for what goes wrong in the world.  Anything else is a
fault of the adapter, ours or a third party's, or an answer nobody thought of; it
must cost the one question that was asked, and never the daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from rolloutd.errors import AdapterFailed, RolloutdError

log = logging.getLogger("rolloutd.ports")

T = TypeVar("T")


@contextmanager
def answering_for(adapter: str) -> Iterator[None]:
    """Make of whatever is raised unforeseen an AdapterFailed that names the adapter.

    What is raised on purpose passes: RolloutdError, TimeoutError, cancellation.
    """
    try:
        yield
    except (RolloutdError, TimeoutError):
        raise
    except OSError as error:
        raise AdapterFailed(f"{adapter}: {error}") from error
    except Exception as error:
        log.exception("%s: unexpected error", adapter)
        raise AdapterFailed(f"{adapter}: unexpected {type(error).__name__}: {error}") from error


def answer_of(adapter: str, said: T, *answers: type[object]) -> T:
    """Return what an adapter said; raises AdapterFailed where that is none of the answers of its port."""
    if not isinstance(said, answers):
        raise AdapterFailed(f"{adapter}: answered with {said!r:.80}, which is no answer")
    return said
