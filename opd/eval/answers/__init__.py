"""Answers as written: extracting them, reading them, and telling whether two are the same."""
