"""The console as a Textual app: letters in, pictures out, deeds sent.

One worker takes what the connection has left in the mailbox, folds it into the
model and has the screen that is seen drawn, at most once per frame, however much
happens.  Another looks after the questions that the model wishes to have asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen

from rolloutd.control.client import Client, path_of
from tui import actions, deeds, glance, standing, theme, wording
from tui.actions import Action
from tui.commands import Commands
from tui.desk import Desk
from tui.dialog import Dialog
from tui.glance import Survey
from tui.lines import Line, clean
from tui.link import ASK_LIMIT_S, Asker, Listener, Live, Lost, Mailbox, Said
from tui.logs import LogReader, Told
from tui.model import Model
from tui.page import Page
from tui.plain import Plain
from tui.prompt import Prompt
from tui.question import Request, Subject
from tui.screens.fleet import FleetPage
from tui.values import RolloutState
from tui.ways import Ways
from tui.wishes import SHARE, Wishes

FRAME_S = 0.06
"""Between two frames while something happens: soon enough to feel immediate, more than anybody reads."""

LOOK_S = 0.25
"""How often it is looked whether a question may be asked again, and a clock has moved on."""

HINT_S = 20.0
"""How long a hint for somebody new stays."""


class Console(Ways):
    """Everything an operator sees and decides."""

    TITLE = "rolloutd"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[Any]] = {Commands}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(action.key, f"act('{action.name}')", action.title, show=False) for action in actions.ACTIONS
    ]
    CSS = """
    Toast { max-width: 90%; }
    """

    def __init__(
        self,
        client: Client,
        *,
        now: Callable[[], float] = time.time,
        theme_name: str | None = None,
        ascii_only: bool = False,
        still: bool = False,
        reach: str = "",
        hint: str = "",
    ) -> None:
        super().__init__()
        self.client = client
        self.now = now
        self.reach = reach
        self.hint = hint
        self.model = Model()
        self.lost: Lost | None = None
        self.is_known = False
        self.connections = 0
        self._questions = Client(client.path, ASK_LIMIT_S)
        self._mailbox = Mailbox()
        self._listener = Listener(client, self._mailbox, now)
        self._asker: Asker | None = None
        self._bell = asyncio.Event()
        self._said = ""
        self._surveys: dict[str, tuple[int, float, Survey]] = {}
        self._plain = Plain(enabled=ascii_only)
        self._wishes = Wishes(self.model, self._questions, self.ask)
        for each in theme.THEMES:
            self.register_theme(each)
        self.theme = theme.chosen(theme_name)
        if still:
            self.animation_level = "none"

    # -- its life

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Let no glyph through where the terminal has none."""
        filters = super().get_line_filters()
        return [*filters, self._plain] if self._plain.enabled else filters

    def get_default_screen(self) -> Screen[Any]:
        """Start with all rollouts."""
        return FleetPage()

    def on_mount(self) -> None:
        """Connect."""
        loop = asyncio.get_running_loop()
        self._asker = Asker()

        def ring() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._bell.set)

        self._mailbox.ring = ring
        self._listener.start()
        self.run_worker(self._draw_frames(), group="frames")
        self.set_interval(LOOK_S, self._look)
        if self.hint:
            self.notify(self.hint, timeout=HINT_S, markup=False)

    def on_unmount(self) -> None:
        """Let the thread go."""
        self._listener.stop()

    async def _draw_frames(self) -> None:
        while True:
            await self._bell.wait()
            self._bell.clear()
            self._take()
            await asyncio.sleep(FRAME_S)

    def _take(self) -> None:
        """Fold what has come and draw it."""
        lines: list[Mapping[str, Any]] = []
        for letter in self._mailbox.take():
            match letter:
                case Live():
                    self._connected(letter)
                case Lost():
                    self.lost = letter
                case _:
                    lines.append(letter)
        if lines:
            self.model.lines_told(lines)
        for gone in self._surveys.keys() - self.model.rollouts.keys():
            del self._surveys[gone]
        self._serve()
        self.redraw()

    def _connected(self, live: Live) -> None:
        if live.is_other:
            self.model.forget()
            self._surveys.clear()
            self.say(
                "this daemon has another history than the one before: everything was read anew", "warning"
            )
        elif self.lost is not None and self.is_known:
            self.say(f"connected again after {wording.span(live.at - self.lost.since)}")
        self.lost = None
        self.is_known = True
        self.connections += 1
        model = self.model
        model.me, model.settings, model.health = (
            live.answers[name] for name in ("whoami", "settings", "health")
        )
        model.status_answered(live.answers["status"])
        model.wish_for("locks")
        model.wish_for("closed")
        if self.connections > 1:
            model.missed()

    def _look(self) -> None:
        self._serve()
        self.redraw()

    def redraw(self) -> None:
        """Draw the screen that is seen."""
        for screen in reversed(self.screen_stack):
            if isinstance(screen, Page):
                screen.changed()
                return

    # -- questions

    def want(self, what: str, rollout: str = "") -> None:
        """Have something asked because a person waits for it."""
        self.model.wish_for(what, rollout)
        self._serve()

    def look_at(self, rollout: str) -> None:
        """Have a rollout's nodes kept up to date."""
        self.model.look_at(rollout)
        self._serve()

    def _serve(self) -> None:
        """Ask what the model wishes for, where it is time."""
        if self.lost is None and self.is_known:
            for work in self._wishes.due():
                self.run_worker(self._fulfil(work), group="questions")

    async def _fulfil(self, work: Callable[[], Awaitable[None]]) -> None:
        await work()
        self._bell.set()

    def survey(self, rollout: RolloutState) -> Survey:
        """Return what is told of a rollout's nodes together; of a large fleet somewhat old, for a moment."""
        kept = self._surveys.get(rollout.id)
        began = time.monotonic()
        if kept is not None and (kept[0] == rollout.version or began < kept[1]):
            return kept[2]
        seen = glance.survey((rollout.nodes or {}).values(), self.now())
        took = time.monotonic() - began
        self._surveys[rollout.id] = (rollout.version, began + took * SHARE, seen)
        return seen

    async def ask(self, work: Callable[[], Any]) -> Said[Any]:
        """Ask something in a thread."""
        assert self._asker is not None
        return await self._asker.ask(work)

    async def ask_node(self, rollout: str, node: str) -> Said[Any]:
        """Ask for a node with its steps."""
        path = path_of("rollouts", rollout, "nodes", node)
        return await self.ask(lambda: self._questions.get(path))

    async def ask_path(self, *parts: str, **query: Any) -> Said[Any]:
        """Ask for a path of the API."""
        return await self.ask(lambda: self._questions.get(path_of(*parts), query))

    def read_log(self, rollout: str, node: str, attempt: int | None, told: Told) -> LogReader:
        """Return a reader of a node's log."""
        loop = asyncio.get_running_loop()
        path = ("rollouts", rollout, "nodes", node, "log")
        return LogReader(self.client, path, attempt, told, loop.call_soon_threadsafe)

    # -- moves and deeds

    def action_act(self, name: str) -> None:
        """Do what a key stands for."""
        self.act(name)

    def act(self, name: str) -> None:
        """Do an action: a move here or on the screen, or a deed after its question."""
        action = actions.BY_NAME[name]
        if action.deed is not None:
            self._begin_deed(action)
            return
        for where in (self.screen, self):
            move = getattr(where, f"do_{name}", None)
            if move is not None:
                move()
                return

    def _begin_deed(self, action: Action) -> None:
        page = self.screen
        assert action.deed is not None
        if not isinstance(page, Page):
            return
        subject = self._with_freeze(page.subject())
        lacking = action.deed.lacks(subject)
        if lacking:
            self.say(f"{action.title}: {lacking}", "warning")
            return
        verdict = action.deed.may(self.model, subject)
        if not verdict.may:
            self.say(f"{action.title}: {verdict.why}", "warning")
            return
        if action.deed is deeds.APPROVE and deeds.unread(subject):
            assert subject.gate is not None
            self.open_gate(subject.gate.key)
            self.say("a yes covers what has failed until now: read it here, then a")
            return
        deed = action.deed

        def answered(answers: Mapping[str, str] | None) -> None:
            if answers is not None:
                self.run_worker(self._send(deed.request(subject, answers)), group="deeds")

        self.push_screen(Dialog(deed.question(subject)), answered)

    def _with_freeze(self, subject: Subject) -> Subject:
        locks = self.model.locks
        if subject.freeze is None and locks is not None and locks["freezes"]:
            return Subject(
                subject.rollout,
                subject.node,
                subject.node_name,
                subject.gate,
                subject.hold,
                locks["freezes"][0],
                subject.shown,
            )
        return subject

    async def _send(self, request: Request) -> None:
        methods = {"POST": self._questions.post, "PUT": self._questions.put, "DELETE": self._questions.delete}
        said = await self.ask(lambda: methods[request.method](request.path, dict(request.body)))
        if said.refused is not None:
            self.say(f"refused: {said.refused}", "error")
        elif said.silent is not None:
            self.say(
                f"no answer: {said.silent}. Whether it was done is not known: look before you repeat it",
                "error",
            )
        else:
            self.say(request.done)
        self.model.wish_for("status")
        self.model.wish_for("locks")
        self._serve()

    def say(self, text: str, severity: Any = "information") -> None:
        """Show a sentence for a while."""
        # One sentence at a time leaves the screen to be read; only what went wrong stays beside the next.
        if self._said != "error":
            self.clear_notifications()
        self._said = severity
        self.notify(clean(text), severity=severity, timeout=8, markup=False)

    def ask_text(self, label: str, text: str, then: Callable[[str], None]) -> None:
        """Ask for a line of text."""
        self.push_screen(Prompt(label, text), lambda answer: None if answer is None else then(answer))

    def do_palette(self) -> None:
        """Find by name."""
        self.action_command_palette()

    def do_theme(self) -> None:
        """Change between dark and light."""
        self.theme = theme.DARK if self.theme == theme.LIGHT else theme.LIGHT
        self.refresh(layout=True)
        self.screen.refresh(recompose=False)
        for widget in self.screen.query("*"):
            widget.refresh()

    def do_quit(self) -> None:
        """Leave."""
        self.exit()

    # -- what every screen says

    def standing(self, width: int) -> Line:
        """Return the connection and who we are, for the right end of the top line."""
        return standing.line(self.model, self.lost, width, is_known=self.is_known, reach=self.reach)

    def alerts(self, width: int) -> Sequence[Line]:
        """Return what everybody must see, on every screen."""
        return standing.alerts(self.model, self.lost, width, self.now(), is_known=self.is_known)


_AS_PAGES_KNOW_IT: type[Desk] = Console
"""Held by mypy: the app is all that its pages ask of it."""
