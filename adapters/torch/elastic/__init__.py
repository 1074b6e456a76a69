"""Training that continues when the number of ranks changes."""

from __future__ import annotations

from sirtaki.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
