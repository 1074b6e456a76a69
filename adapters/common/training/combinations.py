"""Combinations of techniques: a table refuses choices, and makes docs/reference/combinations.md.

A choice is an argument of a call, or a kind of job. A rule names two choices that exclude each other, says
why, and what to do. Checks of a single argument, and of models and data, are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from sirtaki.bindings.context import is_elastic
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set

# In the words of the documentation, by the key that rules use.
CHOICES = {
    "shard": "`shard=`",
    "shard_gradients": '`shard="gradients"`',
    "overlap_forward": "`overlap_forward=`",
    "gradients_in_shared_memory": "`gradients_in_shared_memory=`",
    "memory": "`Compression.powersgd()` and others with a memory",
    "adasum": "`op=hvd.Adasum`",
    "deadline": "`deadline=`",
    "staleness": "`staleness=`",
    "diloco": "`hvd.DiLoCo`",
    "memory_of_gradients": "`Compression.powersgd()` and `onebit()`; `int8()` and `fp8()` with `start=`",
    "parameter_server": "`hvd.ParameterServer`",
    "keras_shard": "`shard=` of Keras",
    "jax_shard": "`hvd.shard` of JAX",
    "elastic": "an elastic job",
    "process_set": "`process_set=`",
    "sum": "`op=hvd.Sum`",
    "extreme": "`op=hvd.Min`, `Max` or `Product`",
    "predivide": "`gradient_predivide_factor=`",
    "sixteen_bits": "`Compression.fp16` or `bf16`",
    "groups": "`groups=`",
    "passes": "`backward_passes_per_step=`",
    "sparse_as_dense": "`sparse_as_dense=`",
}


class Exclusion(NamedTuple):
    """Two choices that exclude each other.

    Attributes:
        technique, other: the choices.
        text: what is wrong, why, and what to do; {technique} and {other} stand for the program's words.
    """

    technique: str
    other: str
    text: str


def _rules(technique: str, text: str, *others: str) -> list[Exclusion]:
    return [Exclusion(technique, other, text) for other in others]


def _elastic(technique: str, why: str, instead: str = "leave it out") -> Exclusion:
    text = (
        f"{{technique}} is not available in an elastic job, {why}: {instead}, or use hvdrun without --min-np"
    )
    return Exclusion(technique, "elastic", text)


_EQUAL_STATES = "whose commits need equal states on all ranks"
_DEADLINE = "a deadline cannot be combined with {other}"
_MEAN = (
    "staleness needs op=hvd.Average without gradient_predivide_factor, because an update is the mean of "
    "gradients whose number varies"
)
_NOT_THEMSELVES = (
    "{other} does not exchange the gradients themselves, so it has no use for gradients_in_shared_memory: "
    "leave out one of them"
)
_ADDS_UP = (
    "{technique} adds up what it has left out, so it needs op=hvd.Average or op=hvd.Sum; take "
    "Compression.fp16 or Compression.bf16 with another op"
)
# Techniques each of which decides by itself which gradients a step has.
_OF_ONE_STEP = ("shard", "staleness", "deadline", "overlap_forward", "gradients_in_shared_memory")

RULES: tuple[Exclusion, ...] = (
    *(
        Exclusion(first, second, f"{first} and {second} cannot be combined: give the optimizer one of them")
        for first, second in combinations(_OF_ONE_STEP, 2)
    ),
    *_rules("staleness", _MEAN, "sum", "extreme", "adasum", "predivide"),
    *_rules(
        "staleness", "staleness sends gradients as they are: leave out compression", "sixteen_bits", "memory"
    ),
    Exclusion("staleness", "process_set", "staleness needs all ranks of the job: leave out process_set"),
    Exclusion(
        "staleness",
        "passes",
        "with staleness, the gradients of all backward passes before a step add up: leave out "
        "backward_passes_per_step",
    ),
    Exclusion(
        "staleness", "groups", "staleness exchanges all gradients together: leave out groups and num_groups"
    ),
    _elastic("staleness", _EQUAL_STATES),
    *_rules(
        "deadline",
        "a deadline needs op=Average or op=Sum, because others cannot leave out a rank",
        "adasum",
        "extreme",
    ),
    *_rules(
        "deadline",
        _DEADLINE,
        "sixteen_bits",
        "predivide",
        "groups",
        "sparse_as_dense",
        "process_set",
    ),
    Exclusion("deadline", "memory", "a deadline cannot be combined with compression"),
    _elastic("deadline", f"{_EQUAL_STATES}, and late ranks keep gradients of their own"),
    *_rules("memory", _ADDS_UP, "adasum", "extreme"),
    Exclusion(
        "memory",
        "groups",
        "{technique} exchanges all gradients together, so groups have no meaning: leave them out",
    ),
    Exclusion(
        "shard", "adasum", "op=Adasum needs each rank's own step with whole gradients: leave out shard"
    ),
    Exclusion("shard_gradients", "extreme", 'shard="gradients" needs op=hvd.Average or op=hvd.Sum'),
    Exclusion("shard_gradients", "groups", 'groups have no meaning with shard="gradients": leave them out'),
    Exclusion(
        "shard",
        "memory",
        "{other} keeps what it leaves out of whole gradients, so it does not go with shard: take "
        "Compression.fp16 or Compression.bf16",
    ),
    *_rules("gradients_in_shared_memory", _NOT_THEMSELVES, "adasum", "sixteen_bits", "memory", "predivide"),
    Exclusion(
        "overlap_forward",
        "adasum",
        "op=Adasum exchanges the changes of parameters after the step, so it has no use for overlap_forward: "
        "leave it out",
    ),
    Exclusion(
        "overlap_forward",
        "memory",
        "{other} exchanges all gradients together, and overlap_forward one by one: take Compression.fp16 or "
        "Compression.bf16, or leave out overlap_forward",
    ),
    Exclusion(
        "overlap_forward",
        "groups",
        "overlap_forward exchanges each gradient by itself: leave out groups and num_groups",
    ),
    Exclusion(
        "elastic",
        "process_set",
        "in an elastic job all ranks have to train one model, because a rank that joins gets the state of "
        "another: leave out process_set",
    ),
    Exclusion(
        "diloco",
        "memory_of_gradients",
        "DiLoCo has no place for the memory of {other}: take Compression.topk() to send large differences "
        "only, or Compression.fp16, bf16, int8() or fp8() to round all of them",
    ),
    _elastic(
        "parameter_server",
        "because a lost rank's part of the table exists nowhere else",
        "use DistributedOptimizer",
    ),
    Exclusion(
        "keras_shard",
        "passes",
        "gradients of several passes add up in optimizer variables of the size of the model, on each rank: "
        "leave out shard, or take larger batches instead of several passes",
    ),
    Exclusion(
        "keras_shard", "process_set", "shard= divides the state among all ranks: leave out process_set"
    ),
    *_rules("jax_shard", "shard needs op=hvd.Average or op=hvd.Sum", "extreme", "adasum"),
)


def refuse_combinations(choices: Mapping[str, str | bool]) -> None:
    """Raises ValueError if two of a program's choices exclude each other.

    Args:
        choices: by key of `CHOICES`: whether it is made, or the program's words for it.
    """
    for rule in RULES:
        technique, other = choices.get(rule.technique), choices.get(rule.other)
        if technique and other:
            raise ValueError(rule.text.format(technique=technique, other=other))


def require_all_ranks(process_set: ProcessSet) -> None:
    """Raises ValueError if an object of an elastic job is to work on some of the ranks only."""
    has_set = process_set is not global_process_set
    refuse_combinations({"elastic": is_elastic(), "process_set": has_set})


def as_markdown() -> str:
    """Returns the rules as a table of the documentation: with each technique, the choices that it refuses."""
    refused: dict[str, dict[str, None]] = {}
    for rule in RULES:
        refused.setdefault(rule.technique, {})[rule.other] = None
    for rule in RULES:
        if rule.other in refused:
            refused[rule.other][rule.technique] = None
    rows = [
        f"| {CHOICES[technique]} | {'; '.join(CHOICES[other] for other in refused[technique])} |"
        for technique in CHOICES
        if technique in refused
    ]
    return "\n".join(["| Choice | Does not go with |", "|---|---|", *rows])
