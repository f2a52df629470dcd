"""Kubernetes clusters: their nodes watched, isolated, drained, judged and put back.

Only what is asked of the API server lives here.  The heavy client library is
imported where a cluster is first spoken to, so a fleet without Kubernetes never
pays for it.
"""
