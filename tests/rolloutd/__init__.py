"""The tests of the shell."""
