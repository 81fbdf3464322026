"""Rollout servers: the student samples elsewhere, from weights that the trainer sends after each update."""
