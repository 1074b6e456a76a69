"""Combinations of techniques: each rule of the table answers a program, and the page has all of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from test_structure import ROOT
from torch import nn
from world import in_world

import sirtaki.torch as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.survivors import Survivors
from sirtaki.common.training.combinations import CHOICES, RULES, as_markdown

MADE_BY: dict[str, dict[str, Any]] = {
    "shard": {"shard": "state"},
    "shard_gradients": {"shard": "gradients"},
    "overlap_forward": {"overlap_forward": True},
    "gradients_in_shared_memory": {"gradients_in_shared_memory": True},
    "memory": {"compression": hvd.Compression.topk(0.1)},
    "adasum": {"op": hvd.Adasum},
    "deadline": {"deadline": 1.0},
    "staleness": {"staleness": 1},
    "elastic": {},
    "sum": {"op": hvd.Sum},
    "extreme": {"op": hvd.Max},
    "predivide": {"gradient_predivide_factor": 2.0},
    "sixteen_bits": {"compression": hvd.Compression.fp16},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "sparse_as_dense": {"sparse_as_dense": True},
}
OF_OPTIMIZERS = [rule for rule in RULES if rule.technique in MADE_BY]


@in_world(3)
def test_each_rule_of_an_optimizer_is_the_answer_to_a_program() -> None:
    context = current()
    pair = hvd.add_process_set([0, 1])
    arguments = {**MADE_BY, "process_set": {"process_set": pair}}
    for rule in OF_OPTIMIZERS:
        chosen = {**arguments[rule.technique], **arguments[rule.other]}
        context.survivors = Survivors() if "elastic" in rule else None
        pieces = re.split(r"{technique}|{other}", rule.text)
        try:
            with pytest.raises(ValueError, match=".*".join(map(re.escape, pieces))):
                hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), **chosen)
        finally:
            context.survivors = None


def test_the_keys_are_known_and_no_rule_is_twice() -> None:
    assert {key for rule in RULES for key in (rule.technique, rule.other)} == CHOICES.keys()
    pairs = [frozenset((rule.technique, rule.other)) for rule in RULES]
    assert len(set(pairs)) == len(pairs)


def test_the_page_has_the_table() -> None:
    assert as_markdown() in (ROOT / "docs" / "reference" / "combinations.md").read_text()
