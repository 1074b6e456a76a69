"""Measures local SGD and DiLoCo: steps over a limited link, and the loss of a small language model.

    sudo python benchmarks/local_steps.py [--hosts 2] [--rate 1gbit] [--json FILE]
    python benchmarks/local_steps.py --only losses [-np 2] [--updates 1500] [--rounds 3] [--methods ...]

Steps: hosts are network namespaces on a bridge, each with one rank and its own link of the given rate. A step
is the mean over complete windows. Losses: a language model of characters learns the topics of pydoc, in as
many steps with each way to exchange. Each round has another seed, for the model and the ranks' data. The
ranks share a host but not its memory, so int8 rounds as it does between hosts. Noise is the difference
between the largest and the smallest loss of synchronous training. DiLoCo(0.1) has an outer rate of 0.1, not
the paper's 0.7: differences after few steps point the same way, and momentum multiplies them by up to 10.
DiLoCo(3 %) and DiLoCo(1 %) send the largest differences only, and have an outer rate of 1 without momentum.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import torch
from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.models import Step, large_linear, transformer
from common.options import RANKS, Option, choice, number, rounds
from common.over_hosts import HOST_OPTIONS, hosts_of, ranks_on
from common.report import Columns, Row, Table, Target, at_least, at_most, make_table
from common.torch_ranks import TorchRank
from torch import Tensor, nn

import sirtaki.torch as hvd

PORT = 29_900
EVERY = (1, 10, 100)
WINDOWED = ("LocalSGD", "DiLoCo")
# The rate and the momentum of the outer optimizer: those of DiLoCo, a rate for few steps between exchanges,
# and those of SparseLoCo.
OUTER = {"DiLoCo": (0.7, 0.9), "DiLoCo(0.1)": (0.1, 0.9), "DiLoCo(3 %)": (1, 0), "DiLoCo(1 %)": (1, 0)}
FRACTIONS = {"DiLoCo(3 %)": 0.03, "DiLoCo(1 %)": 0.01}  # of the differences that are sent
ALL_WINDOWED = ("LocalSGD", *OUTER)
COMPRESSED = ("int8", "powersgd")
LEAST_GAIN = 3.0  # times the synchronous step's speed, of the linear model with LocalSGD and every=100
SETTINGS = {"SIRTAKI_TRANSPORT": "socket"}  # of trainings
MODELS: dict[str, Callable[[], Step]] = {"linear": large_linear, "transformer": transformer}
ROWS = 16  # of a rank's batch
RATE = 3e-3  # of AdamW at the beginning; it falls to a tenth
LEAST_WARM_UP = 2  # steps
# The language model of characters, and English text that every Python has: the topics of pydoc.
CONTEXT = 64  # characters
WIDTH, LAYERS, HEADS = 96, 2, 4
PIECE = 4096  # characters; every tenth piece is for validation
VALIDATION_ROWS = 512


def load() -> tuple[Tensor, Tensor, int]:
    """Returns the numbers of the characters for training and for validation, and how many there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([characters[character] for character in text])
    pieces = numbers.split(PIECE)
    training = torch.cat([piece for place, piece in enumerate(pieces) if place % 10])
    return training, torch.cat(pieces[::10]), len(characters)


def batch_of(text: Tensor, rows: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns passages from random places, and the characters that follow each of theirs."""
    starts = torch.randint(len(text) - CONTEXT, (rows, 1), generator=source)
    places = starts + torch.arange(CONTEXT)
    return text[places], text[places + 1]


class LanguageModel(nn.Module):
    """A transformer of 240,000 parameters, which predicts the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) / WIDTH**0.5)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, characters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, passages: Tensor) -> Tensor:
        hidden = self.embedding(passages) + self.position
        return self.out(self.layers(hidden, mask=self.mask, is_causal=True))

    def loss(self, passages: Tensor, following: Tensor) -> Tensor:
        """Returns the mean cross-entropy of a character, in nats."""
        return nn.functional.cross_entropy(self(passages).flatten(0, 1), following.flatten())


@torch.no_grad()
def validation_loss(model: LanguageModel, text: Tensor) -> float:
    """Returns the loss on the same passages in each call."""
    passages, following = batch_of(text, VALIDATION_ROWS, torch.Generator().manual_seed(0))
    return model.loss(passages, following).item()


def distributed(method: str, every: int, model: nn.Module, plain: Any, exact: int = 0) -> Any:
    """Returns an optimizer that exchanges by a method; compressions begin after `exact` steps."""
    if method == "LocalSGD":
        return hvd.LocalSGD(plain, every, model=model)
    if method in OUTER:
        rate, momentum = OUTER[method]
        outer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        fraction = FRACTIONS.get(method)
        compression = hvd.Compression.topk(fraction, start=0) if fraction else hvd.Compression.none
        return hvd.DiLoCo(model, plain, outer, every, compression=compression)
    kinds = {"int8": hvd.Compression.int8, "powersgd": lambda: hvd.Compression.powersgd(4, start=exact)}
    return hvd.DistributedOptimizer(plain, compression=kinds.get(method, lambda: hvd.Compression.none)())


def sent_bytes() -> int:
    """Returns the bytes that this rank has sent, control messages included."""
    return sum(connection["bytes"] for connection in hvd.stats()["sent"])


class LocalRank(TorchRank):
    """Steps with few exchanges, and trainings of a small language model."""

    def steps(self, model: str, method: str, every: int, least: int) -> dict[str, float]:
        """Takes complete windows of steps, `least` steps at least; returns the mean step and its bytes."""
        torch.manual_seed(hvd.rank())  # of the batch
        step = MODELS[model]()
        torch.manual_seed(0)
        network = step.make_model()
        optimizer = distributed(method, every, network, torch.optim.SGD(network.parameters(), lr=1e-4))
        for _ in range(LEAST_WARM_UP):
            step.train(network, optimizer)
        if method != "synchronous":
            optimizer.synchronize()  # windows begin here
        count = -(-least // every) * every
        hvd.barrier()
        before, start = hvd.stats()["bytes"], time.perf_counter()
        for _ in range(count):
            step.train(network, optimizer)
        seconds = time.perf_counter() - start
        return {"seconds": seconds / count, "bytes": (hvd.stats()["bytes"] - before) / count}

    def train(self, method: str, every: int, updates: int, seed: int) -> dict[str, float]:
        """Trains a language model, with other data on each rank.

        Returns its loss on the validation text, and the bytes that this rank has sent in an exchange.
        """
        training, validation, characters = load()
        torch.manual_seed(seed)
        model = LanguageModel(characters)
        source = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        plain = torch.optim.AdamW(model.parameters(), lr=RATE)
        decay = torch.optim.lr_scheduler.LinearLR(plain, 1.0, 0.1, updates)
        optimizer = distributed(method, every, model, plain, exact=updates // 10)
        before = sent_bytes()
        for _ in range(updates):
            optimizer.zero_grad()
            model.loss(*batch_of(training, ROWS, source)).backward()
            optimizer.step()
            decay.step()
        sent = sent_bytes() - before
        if method == "LocalSGD" or method in OUTER:
            optimizer.synchronize()
        hvd.check_parameters(model.state_dict())
        return {"loss": validation_loss(model, validation), "sent": sent / max(updates // every, 1)}


def name_of(row: Row) -> str:
    return f"{row['method']}, every={row['every']}" if row["method"] in ALL_WINDOWED else row["method"]


def ways_of(options: Namespace, methods: Sequence[str] = WINDOWED) -> list[tuple[str, int]]:
    """Returns the methods with local steps, each with its steps between two exchanges."""
    windowed = [method for method in ALL_WINDOWED if method in methods]
    return [("synchronous", 1), *((method, every) for method in windowed for every in options.every)]


STEP_COLUMNS: Columns = {
    "model": "{model}",
    "training": name_of,
    "step ms": "{milliseconds:,.1f}",
    "synchronous time / its time": "{gain:.2f}",
    "MB combined in a step": "{megabytes:.2f}",
}
LOSS_COLUMNS: Columns = {
    "training": name_of,
    "loss by seed": lambda row: "  ".join(f"{loss:.3f}" for loss in row["losses"]),
    "mean": "{mean:.3f}",
    "over synchronous": "{excess:+.3f}",
    "KB sent in an exchange": "{kilobytes:,.0f}",
}


def measure(options: Namespace) -> Results:
    """Measures both parts, or one of them."""
    steps, losses = [], []
    versions: dict[str, str] = {}
    if "steps" in options.only:
        with (
            hosts_of(options) as (hosts, key),
            Job(ranks_on(hosts, 1, key, PORT), len(hosts), LocalRank) as job,
        ):
            versions = job.ask("versions")[0]
            steps = [row for model in options.models for row in measure_steps(job, model, options)]
    if "losses" in options.only:
        with Job(hvdrun(options.ranks), options.ranks, LocalRank, settings=SETTINGS) as job:
            versions = job.ask("versions")[0]
            losses = measure_losses(job, options)
    facts = {"hosts": options.hosts, "rate": options.rate, "ranks": options.ranks, "updates": options.updates}
    return {**facts, "versions": versions, "steps": steps, "losses": losses}


def measure_steps(job: Job, model: str, options: Namespace) -> list[Row]:
    """Takes steps by all methods, in turns. A row holds the mean step, and the MB combined on one rank."""
    times: dict[tuple[str, int], list[float]] = {way: [] for way in ways_of(options)}
    combined = {}
    for _ in range(options.rounds):
        for method, every in times:
            ranks = job.ask("steps", model=model, method=method, every=every, least=options.steps)
            times[method, every].append(max(rank["seconds"] for rank in ranks) * 1e3)
            combined[method, every] = ranks[0]["bytes"] / 1e6
    found = {way: median(measured) for way, measured in times.items()}
    plain = found["synchronous", 1]
    return [
        {"model": model, "method": method, "every": every, "milliseconds": time, "gain": plain / time}
        | {"megabytes": combined[method, every]}
        for (method, every), time in found.items()
    ]


def measure_losses(job: Job, options: Namespace) -> list[Row]:
    """Trains by all methods, in turns."""
    compressed = [(method, 1) for method in COMPRESSED if method in options.methods]
    losses: dict[tuple[str, int], list[float]] = {
        way: [] for way in [*ways_of(options, options.methods), *compressed]
    }
    sent = {}
    for seed in range(options.rounds):
        for method, every in losses:
            ranks = job.ask("train", method=method, every=every, updates=options.updates, seed=seed)
            losses[method, every].append(ranks[0]["loss"])
            sent[method, every] = ranks[0]["sent"] / 1e3
    plain = fmean(losses["synchronous", 1])
    return [
        {"method": method, "every": every, "losses": found, "mean": fmean(found)}
        | {"excess": fmean(found) - plain, "kilobytes": sent[method, every]}
        for (method, every), found in losses.items()
    ]


def tables(results: Results) -> Iterator[Table]:
    if results["steps"]:
        title = f"Training step, {results['hosts']} hosts × 1 rank, links of {results['rate']}"
        yield make_table(title, STEP_COLUMNS, results["steps"], group="model", text_columns=2)
    if results["losses"]:
        place = f"{results['ranks']} ranks, {results['updates']} steps"
        title = f"Language model, {place}: loss in nats a character"
        yield make_table(title, LOSS_COLUMNS, results["losses"], text_columns=2)


def judge(results: Results) -> list[Target]:
    """Returns the gain over a link of 1 Gbit/s, and which losses are within the noise."""
    targets = []
    if results["rate"] == "1gbit":
        gains = {(row["model"], row["method"], row["every"]): row["gain"] for row in results["steps"]}
        if found := gains.get(("linear", "LocalSGD", 100)):
            targets.append(
                at_least("speed of a step with LocalSGD, every=100, times synchronous", LEAST_GAIN, found)
            )
    if results["losses"] and len(plain := results["losses"][0]["losses"]) > 1:
        noise = max(plain) - min(plain)
        targets += [
            at_most(f"loss of {name_of(row)}, over synchronous", noise, row["excess"], "nats")
            for row in results["losses"][1:]
        ]
    return targets


OPTIONS = [
    choice("--only", ("steps", "losses"), "what to measure (both)"),
    choice("--models", list(MODELS), "models of the steps (both)"),
    choice("--methods", (*ALL_WINDOWED, *COMPRESSED), "trainings beside synchronous ones (all)"),
    Option("--every", type=int, nargs="+", default=EVERY, help="steps between two exchanges (1 10 100)"),
    RANKS,
    *HOST_OPTIONS,
    number("--steps", 10, "steps of a block at least; whole windows are taken"),
    number("--updates", 1500, "steps of a training"),
    rounds(3, "blocks of each way, and seeds of trainings"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
