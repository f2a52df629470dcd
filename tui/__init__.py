"""The console: the whole fleet in one terminal, and every decision of its user.

    connection/  threads that read the daemon: event stream, logs, single requests
    state/       what the daemon reported: the model, what to fetch again, who may do what
    formatting/  text without Textual: lines with roles, durations, glyphs, colours
    widgets/     what pages are built from: the list, the banner, the status bar
    operations/  what a user can do: the registry of keys, dialogs, requests
    screens/     one page per question
    console.py   what pages use: state, requests, messages, pages to open
    app.py       the loop: messages in, frames out, keys to actions

The console reaches the daemon through `rolloutd.control.client` only.  It decides
and stores nothing, so it may be killed at any moment.
"""
