"""rolloutctl, the command line.

It knows the API's client and JSON shapes, nothing else of the daemon.  Reading commands
import only the standard library, because start-up counts; the shapes are imported for types.
"""
