"""The front end in Kubernetes: a rollout as an object, and votes by users of the cluster.

The object is a request and a view.  The truth is the daemon's store: an edited status has no effect.
"""
