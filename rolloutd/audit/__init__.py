"""The audit's chain of hashes, its anchors elsewhere, and the segments of its oldest entries."""
