"""The whole daemon under a virtual clock, in a world that outlives it; everything follows from a seed.

What runs is rolloutd itself: its loop, its drivers, its store with the real SQL
on a real file.  What is made up is everything outside: time (loop), the nodes
and the playbooks (world, fakes), the people, and what goes wrong (faults).  A
crash is a power cut: the dead daemon's tasks are never stepped again, so no
`finally` runs.

`python -m tests.sim` is the way in; README-like help is in __main__.
"""
