"""A model that vLLM computes, in a process and an environment of its own."""
