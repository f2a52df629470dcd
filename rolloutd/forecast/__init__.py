"""The forecast's process: it reads the store, walks the scheduler in virtual time, and prints JSON.

The daemon starts it (rolloutd/engine/forecasts.py), at low priority and with limits, so that neither the loop
nor a run waits for it.  It writes nothing.
"""
