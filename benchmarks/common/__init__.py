"""What the benchmarks share: statistics, launching, the peers, the limit prototype, tables."""
