"""What a page may ask of the console that it is a page of; the app is one, and pages know no more of it.

Nothing here waits for the daemon but what is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rolloutd.control.client import Client
from tui.glance import Survey
from tui.lines import Line
from tui.link import Said
from tui.logs import LogReader, Told
from tui.model import Model
from tui.values import RolloutState


class Desk(Protocol):
    """What is known, what can be asked, and where one can go."""

    # -- what is known

    @property
    def model(self) -> Model:
        """What the daemon has told."""
        ...

    @property
    def now(self) -> Callable[[], float]:
        """The clock, epoch seconds."""
        ...

    @property
    def client(self) -> Client:
        """Whom we are connected to."""
        ...

    @property
    def is_known(self) -> bool:
        """Whether the daemon has ever answered."""
        ...

    @property
    def connections(self) -> int:
        """How often the daemon was reached: what is of an earlier connection is to be asked for again."""
        ...

    def survey(self, rollout: RolloutState) -> Survey:
        """Return what is told of a rollout's nodes together."""
        ...

    def standing(self, width: int) -> Line:
        """Return the connection and who we are."""
        ...

    def alerts(self, width: int) -> Sequence[Line]:
        """Return what everybody must see, on every page."""
        ...

    # -- what can be asked

    def want(self, what: str, rollout: str = "") -> None:
        """Have something asked because a person waits for it."""
        ...

    def look_at(self, rollout: str) -> None:
        """Have a rollout's nodes kept up to date."""
        ...

    async def ask_node(self, rollout: str, node: str) -> Said[Any]:
        """Ask for a node with its steps."""
        ...

    async def ask_path(self, *parts: str, **query: Any) -> Said[Any]:
        """Ask for a path of the API."""
        ...

    def read_log(self, rollout: str, node: str, attempt: int | None, told: Told) -> LogReader:
        """Return a reader of a node's log."""
        ...

    # -- what can be done

    def act(self, name: str) -> None:
        """Do an action of the registry."""
        ...

    def say(self, text: str, severity: Any = "information") -> None:
        """Show a sentence for a while."""
        ...

    def ask_text(self, label: str, text: str, then: Callable[[str], None]) -> None:
        """Ask for a line of text."""
        ...

    def open_rollout(self, rollout: str) -> None:
        """Show a rollout."""
        ...

    def open_gate(self, key: str) -> None:
        """Show what waits for a decision, and of that the gate with this key."""
        ...

    def open_nodes(self, rollout: str, *, pool: str = "", reason: str = "") -> None:
        """Show nodes of a rollout."""
        ...

    def open_node(self, rollout: str, node: str) -> None:
        """Show one node."""
        ...
