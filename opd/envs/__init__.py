"""Environments: tasks in which the student acts, turn by turn, and a verifier judges what came of it."""
