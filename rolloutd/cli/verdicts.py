"""The command `verdicts`: contents that failed on a class of hosts."""

from __future__ import annotations

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, add_reason_option
from rolloutd.cli.output import print_message, print_table
from rolloutd.control.client import api_path


def register(commands: CommandGroup) -> None:
    parser = commands.add_command(
        "verdicts", verdicts, "list contents that failed and are not submitted again, or clear one"
    )
    parser.usage = "rolloutctl verdicts [--json]\n       rolloutctl verdicts clear VERDICT --reason TEXT"
    parser.add_argument("verb", metavar="clear", nargs="?", choices=("clear",), help="clear a verdict")
    parser.add_argument("verdict", metavar="VERDICT", nargs="?", help="id of the verdict to clear")
    add_reason_option(parser, required=False)


def verdicts(call: Invocation) -> int:
    """List the verdicts, or clear one."""
    args = call.args
    if args.verb == "clear":
        if args.verdict is None or args.reason is None:
            missing = "VERDICT" if args.verdict is None else "--reason"
            raise exits.Exit(exits.USAGE, f"rolloutctl verdicts clear: no {missing}; give one")
        answer = call.client.post(api_path("verdicts", args.verdict, "clear"), {"reason": args.reason})
        return call.report(answer, f"{args.verdict}: cleared; its content may be submitted again")
    found = call.get(api_path("verdicts"))["verdicts"]
    if args.json:
        call.print_data(found)
    elif not found:
        print_message("there are no verdicts")
    else:
        print_table(
            ("ID", "CLASS", "NODE", "AT", "EVIDENCE"),
            (
                (each["id"], each["class"], each["node"], each["at"], f"{each['step']}: {each['text']}")
                for each in found
            ),
        )
    return exits.OK
