"""FleetLock served: a machine that reboots itself asks for a slot of the same pools as all rollouts.

The protocol is that of Zincati, the update agent of Fedora CoreOS.
"""
