"""The program of a server, which hvdrun starts beside the ranks with --servers."""

from __future__ import annotations

import torch

from sirtaki.common.tables import TableServer
from sirtaki.torch.training.stale.table import serve

if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer of a process imports much
    TableServer(serve).run()
