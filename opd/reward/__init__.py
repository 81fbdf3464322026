"""What rollouts are worth while training."""
