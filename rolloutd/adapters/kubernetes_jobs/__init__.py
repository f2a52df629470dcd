"""Runner of Kubernetes Jobs: a Job for each run, in a cluster near the nodes.

`job` builds the objects, `runner` implements the port over the API, `tree_server` hands the source trees to
pods, and `pod` is the program in the pod, which runs the playbook as the runner of this machine does.
"""
