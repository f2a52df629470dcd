"""The registry of actions: keys, key line, palette and help are made from it.

A page or the app carries out an action in its method `do_NAME`.  An action with an
operation changes the fleet; the app asks for confirmation and sends its request.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    "left": "←",
    "right": "→",
    "at": "@",
    "plus": "+",
    "minus": "-",
}


_ALL_SCREENS = "fleet rollout nodes node gates locks audit teams handover comparison changes forecast"
_NODE_SCREENS = "rollout node nodes"


_move, _decide, _app = (partial(Action, group) for group in ("move", "decide", "app"))

ACTIONS: tuple[Action, ...] = (
    _move(
        "open",
        "enter",
        "open",
        "open what is under the cursor",
        "fleet rollout nodes gates audit locks handover comparison forecast",
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
    _move("changes", "m", "changes", "show which node has which change, across rollouts", "fleet"),
    _move("handover", "d", "handover", "show what changed since your last handover, and what waits", "fleet"),
    _move("compare", "c", "canaries", "compare the nodes with the canaries", "rollout gates"),
    _move(
        "forecast", "i", "forecast", "show when nodes are touched, gates ask and the rollout ends", "gates"
    ),
    _move("nodes", "n", "nodes", "show all nodes of the rollout and why they wait", "fleet rollout"),
    _move(
        "find",
        "slash",
        "find",
        "filter by words; ! excludes, esc shows all",
        "fleet rollout nodes node audit locks",
    ),
    _move("sort", "o", "sort", "change the order of the nodes or of the pools", "nodes rollout"),
    _move("timeline", "t", "timeline", "show the pools over time, or their nodes", "rollout"),
    _move("earlier", "left", "earlier", "show the rollout one interval earlier", "rollout"),
    _move("later", "right", "later", "show the rollout one interval later", "rollout"),
    _move("moment", "at", "at", "show the rollout at a time, such as 03:44 or 10m ago", "rollout"),
    _move("now", "0", "now", "show the rollout as it is now"),
    _move("zoom_in", "plus,equals_sign", "zoom in", "show shorter intervals"),
    _move("zoom_out", "minus", "zoom out", "show longer intervals"),
    _move("whole", "l", "full line", "show a cut line in full", "nodes node audit gates locks"),
    _move("next_pane", "tab", "other pane", "focus the other pane", "rollout node gates"),
    _move("follow", "f", "follow", "follow the end of the log, or stop", "node"),
    _move("attempt", "left_square_bracket", "attempt", "show the log of the attempt before", "node"),
    _move("attempt_later", "right_square_bracket", "later", "show the log of the attempt after"),
    _move("copy", "y", "copy", "copy the log to the terminal's clipboard", "node"),
    _move("verify", "v", "verify", "check that the audit is intact", "audit"),
    _decide("approve", "a", "approve", "approve at the gate", "gates rollout fleet", operations.APPROVE),
    _decide("reject", "x", "reject", "reject at the gate", "gates rollout", operations.REJECT),
    _decide("withdraw", "w", "withdraw", "withdraw your votes at the gate", "gates", operations.WITHDRAW),
    _decide(
        "pause",
        "p",
        "pause",
        "start no more nodes of the rollout until it is resumed",
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
    _decide("skip", "s", "skip", "leave out a pending or failed node", _NODE_SCREENS, operations.SKIP),
    _decide(
        "rollback",
        "b",
        "roll back",
        "roll back a failed or changed node",
        _NODE_SCREENS,
        operations.ROLL_BACK,
    ),
    _decide("return", "e", "return", "return an isolated node to service", "node", operations.RETURN),
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
    _app("palette", "colon,ctrl+p", "commands", "find an action, a rollout or a node by name"),
    _app("theme", "T", "theme", "switch between dark and light"),
    _app("leave", "q", "leave", "leave the page, or on the fleet page the console", "fleet"),
    _app("quit", "ctrl+c", "quit", "leave the console; the daemon continues"),
)
"""All actions, in the order of the key line."""

ACTIONS_BY_NAME: Mapping[str, Action] = {action.name: action for action in ACTIONS}
