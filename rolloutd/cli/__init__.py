"""rolloutctl: what a person or a script asks of the daemon, over its socket.

It knows the wire shapes and the client and nothing of the daemon's insides.
Reading commands import the standard library only, because start-up counts: for the
same reason the shapes are imported for the type checker alone.
"""
