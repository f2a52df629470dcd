"""Host keys of the inventory's nodes: collected, compared, and stored on approval.

The daemon writes the audit entry, and this program the file: the daemon may not write below /etc.
"""
