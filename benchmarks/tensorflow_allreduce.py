"""Compares all-reduce in a tf.function with TensorFlow's own: MultiWorkerMirroredStrategy.

    python benchmarks/tensorflow_allreduce.py [-np 2] [--sizes 1K 1M 64M] [--rounds 9] [--json FILE]

Both run in the same processes, and take turns in blocks of calls. Each call runs a traced function that sums
one tensor of float32. A ratio is the median of the ratios of adjacent blocks. Up to 64 KiB, two more
functions take turns: one that exchanges nothing, which measures TensorFlow's own cost of a call; and one with
ten all-reduces, each of which needs the previous one's result.
"""

from __future__ import annotations

from argparse import Namespace

from common.harness import Benchmark, Results
from common.jobs import Job, free_ports, hvdrun
from common.measure import block_calls, median, medians, ratio
from common.options import KIB, MIB, RANKS, rounds, sizes
from common.report import Columns, Row, Table, Target, at_least, at_most, make_table, optional, readable

SIZES = [KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 3, 100
CHAINED = 10  # all-reduces of the function with several


COLUMNS: Columns = {
    "bytes": lambda row: readable(row["bytes"]),
    "sirtaki µs": "{sirtaki:,.0f}",
    "MWMS µs": "{strategy:,.0f}",
    "MWMS / sirtaki (95 %)": "{faster:.1f}",
    "GB/s": lambda row: f"{row['bytes'] / row['sirtaki'] / 1e3:.2f}",
    "no exchange µs": lambda row: optional(row["alone"], ",.0f"),
    "each of 10 µs": lambda row: optional(row["in_chain"], ",.0f"),
}


def measure(options: Namespace) -> Results:
    ranks = options.ranks
    ports = ",".join(map(str, free_ports(ranks)))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with Job(hvdrun(ranks), ranks, "workers.tensorflow_allreduce:FunctionRank", ports, settings=quiet) as job:
        versions = job.ask("versions")[0]
        rows = [measure_size(job, size, options.rounds) for size in options.sizes]
    return {"versions": versions, "ranks": ranks, "rows": rows}


def measure_size(job: Job, size: int, rounds: int) -> Row:
    """Returns times in microseconds, of the slowest rank."""
    calls = block_calls(size, BYTES_PER_BLOCK, LEAST_CALLS, MOST_CALLS)
    functions = job.ask("prepare", size=size)[0]
    times = {who: medians(blocks) for who, blocks in job.blocks(functions, rounds, calls).items()}
    own, strategy = median(times["sirtaki"]), median(times["MWMS"])
    alone, in_chain = None, None
    if "chained" in times:
        alone = median(times["alone"])
        in_chain = (median(times["chained"]) - alone) / CHAINED
    row = {"bytes": size, "sirtaki": own, "strategy": strategy, "alone": alone, "in_chain": in_chain}
    return {**row, "faster": ratio(times["MWMS"], times["sirtaki"])}


def tables(results: Results) -> list[Table]:
    title = f"All-reduce in a tf.function, {results['ranks']} ranks"
    return [make_table(title, COLUMNS, results["rows"])]


def judge(results: Results) -> list[Target]:
    """Returns the targets that these rows can answer; the worst size of a range counts."""
    rows, targets = results["rows"], []
    large = [row["faster"].median for row in rows if row["bytes"] >= 4 * MIB]
    if large:
        targets.append(at_least("speed / MultiWorkerMirroredStrategy's, ≥ 4 MiB", 10, min(large)))
    small = [row["sirtaki"] for row in rows if row["bytes"] <= KIB]
    if small:
        targets.append(at_most("call of a function, ≤ 1 KiB", 150, max(small), "µs"))
    chained = [row["in_chain"] for row in rows if row["bytes"] <= KIB and row["in_chain"] is not None]
    if chained:
        targets.append(at_most("all-reduce ≤ 1 KiB, each of ten in a function", 150, max(chained), "µs"))
    return targets


BENCHMARK = Benchmark(__doc__, [RANKS, sizes(SIZES), rounds(9, "blocks of each")], measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
