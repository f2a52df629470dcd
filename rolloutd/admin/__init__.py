"""Maintenance commands: doctor, backup, restore, init, hosts scan.

`python -m rolloutd.admin` works on files and needs no daemon.  It does not know the loop or the API.
"""
