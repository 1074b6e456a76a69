"""Compares all-reduce inside jit, and a training step, with JAX's own: jax.distributed with gloo.

    python benchmarks/jax_beside_gloo.py [-np 2] [--sizes 1K 1M 64M] [--rounds 9] [--json FILE]

Both run in the same processes, and take turns in blocks of calls. Each call runs a compiled function: one
function sums an array of float32, whose memory is donated; the other takes a training step of a network of
dense layers on this rank's part of a batch. A ratio is the median of the ratios of adjacent blocks. A second
job has sirtaki carry JAX's own collectives, in the place of gloo.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from common.harness import Benchmark, Results
from common.jobs import Job, free_ports, hvdrun
from common.measure import block_calls, median, medians, ratio
from common.options import KIB, MIB, RANKS, rounds, sizes
from common.report import Columns, Row, Table, make_table, readable

SIZES = [KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 3, 100
STEPS = 10  # per block
WIDTHS = [64, 512]  # of the network's layers


COLUMNS: Columns = {
    "sirtaki µs": "{sirtaki:,.0f}",
    "gloo µs": "{gloo:,.0f}",
    "gloo / sirtaki (95 %)": "{faster:.2f}",
    "JAX over sirtaki µs": "{carried:,.0f}",
}


def measure(options: Namespace) -> Results:
    versions, rows = measure_over("gloo", options)
    _, carried = measure_over("sirtaki", options)
    for row, other in zip(rows, carried, strict=True):
        row["carried"] = other["gloo"]
    sums = len(options.sizes)
    return {"versions": versions, "ranks": options.ranks, "sums": rows[:sums], "steps": rows[sums:]}


def measure_over(carrier: str, options: Namespace) -> tuple[dict[str, str], list[Row]]:
    """Measures sirtaki's functions beside JAX's own, whose data this carrier exchanges."""
    ranks = options.ranks
    (port,) = free_ports(1)
    with Job(hvdrun(ranks), ranks, "workers.jax_beside_gloo:JaxRank", str(port), carrier) as job:
        versions = job.ask("versions")[0]
        sums = [measure_sum(job, size, options.rounds) for size in options.sizes]
        return versions, sums + [measure_step(job, width, options.rounds) for width in WIDTHS]


def measure_sum(job: Job, size: int, rounds: int) -> Row:
    job.ask("prepare_sum", size=size)
    return measure_blocks(
        job, readable(size), rounds, block_calls(size, BYTES_PER_BLOCK, LEAST_CALLS, MOST_CALLS)
    )


def measure_step(job: Job, width: int, rounds: int) -> Row:
    parameters = job.ask("prepare_step", width=width)[0]
    return measure_blocks(job, f"6 × Dense({width}), {parameters:,} parameters", rounds, STEPS)


def measure_blocks(job: Job, what: str, rounds: int, calls: int) -> Row:
    own, gloo = (medians(blocks) for blocks in job.blocks(["sirtaki", "jax"], rounds, calls).values())
    return {"what": what, "sirtaki": median(own), "gloo": median(gloo), "faster": ratio(gloo, own)}


def tables(results: Results) -> Iterator[Table]:
    for title, what, part in (("All-reduce", "bytes", "sums"), ("Training step", "network", "steps")):
        columns = {what: "{what}", **COLUMNS}
        yield make_table(f"{title} inside jit, {results['ranks']} ranks", columns, results[part])


BENCHMARK = Benchmark(__doc__, [RANKS, sizes(SIZES), rounds(9, "blocks of each")], measure, tables)

if __name__ == "__main__":
    BENCHMARK.main()
