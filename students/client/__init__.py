"""The trainer's side of rollout servers."""
