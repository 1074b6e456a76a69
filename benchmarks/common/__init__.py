"""Shared parts of the benchmarks: statistics, launching, the peers, the memory-bound prototype, tables."""
