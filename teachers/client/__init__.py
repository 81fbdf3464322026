"""The trainer's side of a teacher server: replicas, retries, and answers that are checked before use."""
