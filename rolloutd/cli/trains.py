"""Commands for trains: rollouts that share the outage of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machines.model.timefmt import format_duration
from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, confirm, duration_argument, without_none
from rolloutd.cli.output import Columns, print_line, print_list, print_message, sanitize
from rolloutd.control.client import ApiError, api_path
from rolloutd.texts.formats import pluralize

if TYPE_CHECKING:
    from rolloutd.control.rollouts.wire import Rollout
    from rolloutd.control.trains.wire_trains import Train


def register(commands: CommandGroup) -> None:
    group = commands.add_group("train", "let several rollouts share one outage of each node")
    name = "the train's name"
    rollouts = "rollout id, its prefix, or its plan's name; the order in which a node gets the changes"
    add = group.add_command("add", add_to_train, "make a train of rollouts, or add rollouts at its end")
    add.argument("name", metavar="TRAIN", text=name)
    add.argument("rollouts", metavar="ROLLOUT", text=rollouts, nargs="+")
    wait = "how long a node waits for its turn, such as 30m (1h)"
    add.argument("--wait", metavar="DURATION", text=wait, type=duration_argument).reason().yes()
    approve = group.add_command("approve", approve_train, "approve a train for the rollouts that you own")
    approve.argument("name", metavar="TRAIN", text=name).reason().yes()
    show = group.add_command("show", show_train, "show a train, or list all")
    show.argument("name", metavar="TRAIN", text=name, nargs="?").watch()
    remove = group.add_command("remove", remove_train, "remove a train; what is shared already is finished")
    remove.argument("name", metavar="TRAIN", text=name).reason()


def add_to_train(call: Invocation) -> int:
    args = call.args
    body = without_none(rollouts=args.rollouts, wait_s=args.wait, reason=args.reason)
    if (shown := _find_train(call, args.name)) is not None:
        # It may have rollouts that others added: the caller approves it with these, too.
        _print_cover(shown)
        confirm(call, lambda: f"train {args.name}: {_describe(shown)}", "add to the train, and approve it?")
        body["shown"] = {"rollouts": shown["rollouts"], "wait_s": shown["wait_s"]}
    train: Train = call.client.put(api_path("trains", args.name), body)
    return call.report(train, f"train {train['name']}: {_describe(train)}", train["name"])


def approve_train(call: Invocation) -> int:
    return _approve(call, call.args.name)


def approve_at_gate(call: Invocation) -> int:
    """Approve the train of one rollout, for that rollout alone."""
    args = call.args
    if any((args.team, args.wave, args.digest, args.node, args.more, args.until, args.unseen)):
        raise exits.Exit(
            exits.USAGE, "approve ROLLOUT train: only --reason applies; leave the other options out"
        )
    rollout: Rollout = call.get(api_path("rollouts", args.rollout))
    if rollout["train"] is None:
        raise exits.Exit(exits.REFUSED, f"{rollout['rollout']}: it is in no train; see rolloutctl train show")
    return _approve(call, rollout["train"]["name"], rollout=rollout["rollout"])


def _approve(call: Invocation, name: str, **chosen: str) -> int:
    """Print what the approval covers, also for scripts, ask at a terminal, and approve just that."""
    shown: Train = call.get(api_path("trains", name))
    _print_cover(shown)
    confirm(call, lambda: f"train {name}: {_describe(shown)}", "approve train?")
    body = {
        "reason": call.args.reason,
        "rollouts": shown["rollouts"],
        "wait_s": shown["wait_s"],
        **chosen,
    }
    train: Train = call.client.post(api_path("trains", name, "approve"), body)
    return call.report(train, f"train {name}: {_describe(train)}", name)


def _find_train(call: Invocation, name: str) -> Train | None:
    try:
        train: Train = call.get(api_path("trains", name))
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    return train


def _print_cover(train: Train) -> None:
    wait = format_duration(train["wait_s"])
    print_message(f"covers {', '.join(train['rollouts'])} in this order, with a wait of {wait}")


def remove_train(call: Invocation) -> int:
    train: Train = call.client.delete(api_path("trains", call.args.name), {"reason": call.args.reason})
    return call.report(train, f"train {train['name']}: removed", train["name"])


def show_train(call: Invocation) -> int:
    if call.args.name is None:
        answer = call.get(api_path("trains"))
        if not call.print_data(answer, [each["name"] for each in answer["trains"]]):
            print_list(TRAIN_COLUMNS, answer["trains"])
        return exits.OK
    train: Train = call.get(api_path("trains", call.args.name))
    if call.print_data(train, [train["name"]]):
        return exits.OK
    print_line(sanitize(f"train {train['name']}: {_describe(train)}"))
    for number, rollout in enumerate(train["rollouts"], 1):
        waits = " (waits for the approval of its owners)" if rollout in train["missing"] else ""
        print_line(sanitize(f"  {number}. {rollout}{waits}"))
    saved, ahead = pluralize(train["outages_saved"], "outage"), train["outages_ahead"]
    shared = pluralize(train["nodes_shared"], "node")
    print_line(f"  {shared} shared, {saved} saved so far, up to {ahead} ahead")
    return exits.OK


TRAIN_COLUMNS: Columns = {
    "TRAIN": "name",
    "STATE": "state",
    "ROLLOUTS": lambda train: ", ".join(train["rollouts"]),
    "SHARED": "nodes_shared",
    "SAVED": "outages_saved",
}


def _describe(train: Train) -> str:
    if train["missing"]:
        return f"waits for the approval of the owners of {', '.join(train['missing'])}"
    return train["state"]
