"""Benchmarks. Each prints JSON; results worth keeping lie in `benchmarks/results`, with the machine's description."""
