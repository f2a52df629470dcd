"""The outside systems, one per file or package; each is imported only when the settings name it.

An adapter implements a protocol of rolloutd.ports and knows nothing of the
daemon, the driver or the store.
"""
