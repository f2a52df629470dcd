"""What an administrator does to the daemon from outside: examine it, back it up, restore it.

A program of its own (`python -m rolloutd.upkeep`, which `rolloutctl` becomes for
it): it works with files and needs no daemon, and knows neither its loop nor its API.
"""
