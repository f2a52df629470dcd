"""Operations on what the cursor shows: rights, confirmation, request, and the command after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tui.console import ConsoleApp
from tui.operations import operations
from tui.operations.actions import Action
from tui.operations.confirm import Operation, OperationRequest, Selection
from tui.operations.dialog import Dialog
from tui.operations.programs import has_terminal, run_program
from tui.screens.page import Page


def start_operation(console: ConsoleApp, action: Action) -> None:
    page, operation = console.screen, action.operation
    assert operation is not None
    if not isinstance(page, Page):
        return
    selection = page.selection()
    if operation is operations.UNFREEZE and selection.freeze is None:
        console.switch_page("locks")
        console.show_message("unfreeze: put the cursor on the freeze to lift, then press U")
        return
    denied = operation.unavailable_reason(selection) or operation.permission(console.model, selection).reason
    if denied:
        console.show_message(f"{action.title}: {denied}", "warning")
        return
    if operation is operations.SHELL and not has_terminal(console):
        console.show_message("shell: a browser has no terminal; use rolloutctl shell in one", "warning")
        return
    if operation is operations.APPROVE and operations.has_unread_failures(selection):
        assert selection.gate is not None
        console.switch_page("gates", selection.gate.key)
        console.show_message("an approval covers the failures that are listed here: read them, then press a")
        return

    _confirm(console, operation, selection)


def _confirm(console: ConsoleApp, operation: Operation, selection: Selection) -> None:
    def submit(field_values: Mapping[str, str] | None) -> None:
        if field_values is not None:
            request = operation.request(selection, field_values)
            console.run_worker(_send_request(console, request), group="operations")

    async def load() -> None:
        nonlocal selection
        loaded = await _load_details(console, operation, selection)
        if loaded is None:
            dialog.call_later(dialog.dismiss, None)
            return
        selection = loaded
        # The dialog handles its messages in order: this after its mount, which a response may precede.
        dialog.call_later(dialog.finish_loading, operation.confirmation(selection))

    # The dialog opens before its details are loaded: keys typed meanwhile are the reason, not actions.
    is_loading = operation in (operations.APPROVE, operations.SHELL)
    dialog = Dialog(operation.confirmation(selection), is_loading=is_loading)
    console.push_screen(dialog, submit)
    if is_loading:
        console.run_worker(load(), group="operations")


async def _load_details(console: ConsoleApp, operation: Operation, selection: Selection) -> Selection | None:
    """Return the selection with the gate's new review, or with the shell's command if there is one."""
    if operation is operations.SHELL:
        shell = await console.fetch_path("nodes", selection.node_name, "shell")
        if shell.result is None:
            console.show_message(f"shell: {shell.error or shell.unreachable}", "error")
            return None
        return replace(selection, shell=shell.result)
    assert selection.rollout is not None
    rollout = selection.rollout.id
    response = await console.fetch_path("rollouts", rollout, "review")
    if response.result is not None:
        console.model.apply_review(rollout, response.result)
    return replace(selection, review=response.result)


async def _send_request(console: ConsoleApp, request: OperationRequest) -> None:
    methods = {
        "POST": console.request_client.post,
        "PUT": console.request_client.put,
        "DELETE": console.request_client.delete,
    }
    response = await console.call_daemon(lambda: methods[request.method](request.path, dict(request.body)))
    if response.error is not None:
        console.show_message(f"refused: {response.error}", "error")
    elif response.unreachable is not None:
        is_unknown = response.unreachable.was_sent
        effect = "The result is unknown: check before you retry" if is_unknown else "Nothing was done"
        console.show_message(f"no response: {response.unreachable}. {effect}", "error")
    elif request.command:
        _run_command(console, request, response.result)
    else:
        console.show_message(request.success_message)
    console.model.request_fetch("status")
    console.request_fetch("locks")


def _run_command(console: ConsoleApp, request: OperationRequest, recorded: Any) -> None:
    if recorded["command"] != list(request.command):
        console.show_message("shell: its command has changed meanwhile: press s again", "error")
        return
    problem = run_program(console, request.command)
    console.show_message(problem or request.success_message, "error" if problem else "information")
