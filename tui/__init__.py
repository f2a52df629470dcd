"""The console: everything an operator sees and decides, in one terminal.

    model.py     what is known: answers of the daemon, and the events after them
    glance.py    what follows from it for people: sentences, groups, timelines
    rights.py    who may do what, and who could instead
    actions.py   the one registry of what can be done, from which keys and help are made
    link.py      the connection: a stream that resumes, and questions beside it
    the rest     Textual: lines that are drawn when they are seen, dialogs, screens

It reaches the daemon through `rolloutd.control.client` and knows nothing else of
it.  Nothing is decided here: whoever kills the console loses a picture.
"""
