"""Whole clusters as nodes: those of a management cluster, and lists of kubeconfigs.

They know nothing of what is changed in a cluster.
"""
