"""Lines, glyphs, durations and colours; text only, so that it is tested as text."""
