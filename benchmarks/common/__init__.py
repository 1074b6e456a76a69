"""Shared parts of the benchmarks: statistics, launching, the peers, the limit prototype, tables."""
