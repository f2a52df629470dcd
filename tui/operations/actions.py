"""The registry of actions: keys, key line, palette and help are made from it.

A page or the app carries out an action in its method `do_NAME`.  An action with an
operation changes the fleet; the app asks for confirmation and sends its request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tui.operations import operations
from tui.operations.confirm import Operation


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a key does; `shown_on` names the screens whose key line shows it."""

    group: str
    name: str
    key: str
    title: str
    help: str
    shown_on: str = ""
    operation: Operation | None = None

    @property
    def screens(self) -> frozenset[str]:
        return frozenset(self.shown_on.split())

    @property
    def key_label(self) -> str:
        first = self.key.split(",")[0]
        return _KEY_LABELS.get(first, first)


_KEY_LABELS = {
    "question_mark": "?",
    "slash": "/",
    "escape": "esc",
    "enter": "↵",
    "colon": ":",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "ctrl+p": "^p",
    "ctrl+c": "^c",
    "ctrl+e": "^e",
    "left": "←",
    "right": "→",
    "at": "@",
    "plus": "+",
    "minus": "-",
    "ampersand": "&",
    "ctrl+s": "^s",
}

_ALL_SCREENS = (
    "fleet rollout nodes node gates locks audit teams inventory verdicts"
    " preparation handover comparison changes change forecast text"
)
_NODE_SCREENS = "rollout node nodes"

_move, _decide, _app = (partial(Action, group) for group in ("move", "decide", "app"))

ACTIONS: tuple[Action, ...] = (
    _move(
        "open",
        "enter",
        "open",
        "open what is under the cursor",
        "fleet rollout nodes gates audit locks handover comparison changes forecast preparation",
    ),
    _move(
        "back",
        "escape,backspace",
        "back",
        "remove the filter, or return to the page before",
        _ALL_SCREENS.removeprefix("fleet "),
    ),
    _move("fleet", "1", "fleet", "show all rollouts"),
    _move("gates", "2", "gates", "show the gates that wait for votes"),
    _move("locks", "3", "locks", "show slots, holds and freezes"),
    _move("audit", "4", "audit", "show who did what"),
    _move("teams", "5", "teams", "show teams, members and limits"),
    _move("inventory", "6", "inventory", "show the sources and the conflicts of nodes"),
    _move("verdicts", "7", "verdicts", "show the content that failed and is refused"),
    _move(
        "logs",
        "l",
        "logs",
        "show the node's log; again, its steps too",
        f"{_NODE_SCREENS} locks preparation",
    ),
    _move(
        "describe",
        "d",
        "describe",
        "show why it waits, its steps, its configuration",
        f"{_NODE_SCREENS} locks preparation",
    ),
    _move(
        "yaml",
        "y",
        "YAML",
        "show what is under the cursor as YAML",
        "fleet rollout nodes node gates locks audit inventory verdicts preparation",
    ),
    _move("plan", "e", "plan", "open the plan in a pager", "fleet rollout gates"),
    _move("preparation", "P", "preparation", "show the prepare stages of each node", "rollout"),
    _move("changes", "m", "changes", "show which node has which version of each plan", "fleet"),
    _move("handover", "D", "handover", "show what changed since your last handover", "fleet"),
    _move("compare", "V", "canaries", "compare the nodes with the canaries", "rollout gates"),
    _move("forecast", "i", "forecast", "show when nodes start, gates ask and all ends", "gates"),
    _move("nodes", "n", "nodes", "show all nodes of the rollout and why they wait", "fleet rollout"),
    _move("search", "slash", "search", "search in the log or the text; n next, N previous", "node text"),
    _move(
        "find",
        "slash",
        "find",
        "filter by words; ! excludes, esc shows all",
        "fleet rollout nodes audit locks changes",
    ),
    _move("next_match", "n", "next", "go to the next line that matches", "text"),
    _move("previous_match", "N", "previous", "go to the previous line that matches"),
    _move("filter_log", "ampersand", "filter", "show the lines with all words; ! excludes", "node"),
    _move("sort", "o", "sort", "change the order of the nodes or of the pools", "nodes rollout changes"),
    _move("sort_by_name", "N", "by name", "order the nodes by name"),
    _move("sort_by_age", "A", "by age", "order the nodes by their latest change"),
    _move("timeline", "t", "timeline", "show the pools over time, or their nodes", "rollout"),
    _move("earlier", "left", "earlier", "show the rollout one interval earlier", "rollout"),
    _move("later", "right", "later", "show the rollout one interval later", "rollout"),
    _move("moment", "at", "at", "show the rollout at 03:44, or 10m ago", "rollout"),
    _move("now", "0", "now", "show the rollout as it is now"),
    _move("zoom_in", "plus,equals_sign", "zoom in", "show shorter intervals"),
    _move("zoom_out", "minus", "zoom out", "show longer intervals"),
    _move(
        "whole",
        "w",
        "full line",
        "show a cut line in full",
        "nodes node audit gates locks inventory verdicts preparation"
        " teams changes change forecast handover comparison",
    ),
    _move("next_pane", "tab", "other pane", "focus the other pane", "rollout node gates"),
    _move("follow", "f", "follow", "follow the end of the log, or stop", "node"),
    _move("attempt", "left_square_bracket", "attempt", "show the log of the attempt before", "node"),
    _move("attempt_later", "right_square_bracket", "later", "show the log of the attempt after"),
    _move("copy", "c", "copy", "copy the name, or all of a log or a text", "node text"),
    _move("save", "ctrl+s", "save", "save the log or the text to a file", "node text"),
    _move("verify", "v", "verify", "check that the audit is intact", "audit"),
    _decide("approve", "a", "approve", "approve at the gate", "gates rollout fleet", operations.APPROVE),
    _decide("reject", "x", "reject", "reject at the gate", "gates rollout", operations.REJECT),
    _decide("withdraw", "W", "withdraw", "withdraw your votes at the gate", "gates", operations.WITHDRAW),
    _decide(
        "pause",
        "p",
        "pause",
        "start no more of its nodes until resumed",
        "fleet rollout",
        operations.PAUSE,
    ),
    _decide(
        "resume", "u", "resume", "resume a rollout that a user paused", "fleet rollout", operations.RESUME
    ),
    _decide(
        "cancel", "C", "cancel", "end the rollout; it cannot be resumed", "fleet rollout", operations.CANCEL
    ),
    _decide("retry", "r", "retry", "queue a failed node again", _NODE_SCREENS, operations.RETRY),
    _decide(
        "shell",
        "s",
        "shell",
        "open a shell on the node",
        f"{_NODE_SCREENS} locks inventory preparation",
        operations.SHELL,
    ),
    _decide("skip", "S", "skip", "leave out a pending or failed node", _NODE_SCREENS, operations.SKIP),
    _decide(
        "rollback",
        "b",
        "roll back",
        "roll back a failed or changed node",
        _NODE_SCREENS,
        operations.ROLL_BACK,
    ),
    _decide("return", "R", "return", "return an isolated node to service", "node", operations.RETURN),
    _decide(
        "hold",
        "h",
        "hold",
        "reserve a node for other work: it takes its slots",
        "node nodes",
        operations.HOLD,
    ),
    _decide("release", "H", "release", "release a hold", "locks", operations.RELEASE),
    _decide(
        "freeze", "F", "freeze", "start no node until the freeze is lifted", _ALL_SCREENS, operations.FREEZE
    ),
    _decide("unfreeze", "U", "unfreeze", "lift a freeze", "locks", operations.UNFREEZE),
    _app("help", "question_mark", "keys", "show all keys", _ALL_SCREENS),
    _app("more_keys", "ctrl+e", "more keys", "show the other keys of the key line"),
    _app("palette", "colon,ctrl+p", "commands", "find an action, a rollout or a node by name"),
    _app("theme", "T", "theme", "switch between dark and light"),
    _app("leave", "q", "leave", "leave the page, or on the fleet page the console", "fleet"),
    _app("quit", "ctrl+c", "quit", "leave the console; the daemon continues"),
)

ACTIONS_BY_NAME: Mapping[str, Action] = {action.name: action for action in ACTIONS}

MOVED: Sequence[tuple[str, str, str]] = (
    ("l", "full line", "w"),
    ("y", "copy", "c"),
    ("d", "handover", "D"),
    ("s", "skip", "S"),
    ("e", "return", "R"),
    ("c", "canaries", "V"),
    ("w", "withdraw", "W"),
    ("/", "filter log", "&"),
)
"""What a key did in 0.1, and the key that does it now."""


def names_by_key() -> Mapping[str, Sequence[str]]:
    """Return the actions of each key: where a key has several, each page has one of them at most."""
    names: dict[str, list[str]] = {}
    for action in ACTIONS:
        for key in action.key.split(","):
            names.setdefault(key, []).append(action.name)
    return names
