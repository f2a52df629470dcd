"""What people, teams and services may ask of the daemon, and the events that follow from it.

Who asks comes from the socket or from a token, never from what is asked; HTTP is not known here.
"""
