"""Asks what the model wishes to know, as often as it may be asked and no oftener.

What a person waits for is asked at once; what is only no longer quite true is
asked the more seldom the longer its answer takes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rolloutd.control.client import Client, NoDaemon, path_of
from tui.link import Said
from tui.model import Model, Wish
from tui.values import NodesAnswer, nodes_of

NOT_FOUND = 404

AGAIN_S: Mapping[str, float] = {
    "status": 0.5,
    "nodes": 2.0,
    "locks": 1.0,
    "closed": 2.0,
    "rollout": 1.0,
    "plan": 1.0,
}
"""The least time between two answers to the same question, while nobody waits for it."""

URGENT_S = 0.1
"""The same where a person waits."""

SHARE = 20
"""What takes long, a question or a survey, is repeated so many times more seldom than it takes."""

MOST_REMEMBERED = 256
"""Questions of which it is known when they were answered: those of all rollouts that anybody looks at."""

Ask = Callable[[Callable[[], Any]], Awaitable[Said[Any]]]


class Wishes:
    """The model's wishes, on their way."""

    def __init__(self, model: Model, client: Client, ask: Ask) -> None:
        self._model = model
        self._client = client
        self._ask = ask
        self._asking: set[tuple[str, str]] = set()
        self._answered_at: dict[tuple[str, str], tuple[float, float]] = {}

    def due(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield what is to be run for each wish whose time has come."""
        now = time.monotonic()
        for key, wish in list(self._model.wishes.items()):
            answered, took = self._answered_at.get(key, (0.0, 0.0))
            pause = URGENT_S if wish.urgent else max(AGAIN_S[wish.what], took * SHARE)
            if key not in self._asking and now - answered >= pause:
                del self._model.wishes[key]
                self._asking.add(key)
                yield partial(self._fulfil, key, wish)

    async def _fulfil(self, key: tuple[str, str], wish: Wish) -> None:
        began = time.monotonic()
        path, take = self._questioned(wish)
        read = self._nodes if wish.what == "nodes" else self._client.get
        said = await self._ask(lambda: read(path))
        self._asking.discard(key)
        self._answered_at.pop(key, None)
        self._answered_at[key] = (time.monotonic(), time.monotonic() - began)
        if len(self._answered_at) > MOST_REMEMBERED:
            del self._answered_at[next(iter(self._answered_at))]
        if said.answer is not None:
            take(said.answer)
        elif said.silent is not None:
            self._model.wishes.setdefault(key, wish)
        elif said.refused is not None and said.refused.status == NOT_FOUND:
            self._model.rollouts.pop(wish.rollout, None)

    def _questioned(self, wish: Wish) -> tuple[str, Callable[[Any], None]]:
        model, rollout = self._model, wish.rollout
        match wish.what:
            case "status":
                return path_of("status"), model.status_answered
            case "locks":
                return path_of("locks"), model.locks_answered
            case "closed":
                return path_of("rollouts"), model.closed_answered
            case "nodes":
                return path_of("rollouts", rollout, "nodes"), partial(model.nodes_answered, rollout)
            case "plan":
                return path_of("rollouts", rollout, "plan"), partial(model.plan_answered, rollout)
            case _:
                return path_of("rollouts", rollout), partial(self._rollout_known, model.seq)

    def _nodes(self, path: str) -> NodesAnswer:
        """Ask for nodes and make them what the model keeps while we are still in the thread that asks."""
        text = self._client.text(path)
        try:
            return nodes_of(text)
        except ValueError as exc:
            raise NoDaemon(f"the answer cannot be read: {exc}") from exc

    def _rollout_known(self, seq: int, answer: Any) -> None:
        self._model.rollout_answered(answer, seq)
        self._model.wish_for("nodes", answer["rollout"])
