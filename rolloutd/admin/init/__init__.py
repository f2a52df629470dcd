"""First setup of a daemon: settings from what this machine and the inventory have.

It asks or takes flags, tests each source as the doctor does, and needs no daemon.
"""
