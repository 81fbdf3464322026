"""Evaluation: extracting and grading answers."""
