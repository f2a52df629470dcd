"""Ansible: playbooks run as processes of their own, nodes found by ansible-inventory.

`runner` is the Runner port, `inventory` the Inventory port.  A run lives in a
directory of its own (`rundir`), is held by a small script that needs nothing
of rolloutd (`wrapper`), speaks through a callback plugin (`callback/`), and is
judged by what it said (`progress`).  What older runs left on a node is ended by
`remnants`, what a run left on this machine by `processes`.  Ansible itself is
never imported: it is run.
"""
