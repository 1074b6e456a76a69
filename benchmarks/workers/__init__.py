"""Workers: the programs of the ranks, which receive orders from the benchmarks in the parent folder."""
