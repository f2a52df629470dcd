"""Background work of the daemon, one file for each kind.

Each file commits its results.  It decides nothing and knows no other file of this package.
"""
