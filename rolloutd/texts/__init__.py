"""Each sentence for people, and the formats of numbers, names and URLs in them; loaded by all programs."""
