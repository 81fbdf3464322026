"""The student on vLLM's engine, which computes in an environment of its own (see `opd.teachers.vllm`)."""
