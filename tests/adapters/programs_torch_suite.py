"""PyTorch's own cases of torch.distributed, which are part of torch, over the backend `sirtaki`.

Three ranks run them in one world, and exit without destroying the group, as ranks of PyTorch's harness do.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import unittest
from pathlib import Path

SIZE = 3
# The cases for GPUs, for more ranks and of DDP need those, and those of objects a random state of their own.
CHOSEN = re.compile(
    r"test_((all_)?reduce|all_reduce_coalesced|(all_)?gather|all_gather_coalesced|scatter|broadcast|all_to_all"
    r"|all_to_all_single|barrier|(batch_)?i?send|irecv|batch_isend_irecv_gloo|get_rank|destroy|get_future"
    r"|sparse_all_reduce_sum|Backend|static_graph_api)"
)
LEFT_OUT = re.compile(r"cuda|nccl|profiler|timeout|object|op_err|op_list_err|mixed_backend")
REFUSED = {"test_sparse_all_reduce_sum": "is sparse (torch.sparse_coo), and this exchanges dense ones only"}


def run(suite: type, name: str, rank: int, skips: set[int]) -> str:
    """Runs a case as a process of PyTorch's harness does; returns "passed", "skipped" or its traceback."""
    case = suite(name)
    case.rank = rank
    try:
        getattr(case, name)()
    except unittest.SkipTest:
        return "skipped"
    except SystemExit as end:
        return "skipped" if end.code in skips else f"exit code {end.code}"
    except Exception:
        return traceback.format_exc()
    return "passed"


def main() -> None:
    folder = Path(sys.argv[1])  # of all ranks
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    # The cases that are for gloo only are chosen when they are imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(SIZE), TEMP_DIR=str(folder))
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Suite(TestDistBackend, DistributedTest._DistTestBase):
        pass

    dist.init_process_group("sirtaki", init_method="sirtaki://")
    skips = {skip.exit_code for skip in TEST_SKIPS.values()}
    names = [name for name in dir(Suite) if CHOSEN.match(name) and not LEFT_OUT.search(name)]
    passed = 0
    for name in names:
        dist.barrier()
        result = run(Suite, name, dist.get_rank(), skips)
        passed += result == "passed"
        expected = REFUSED.get(name)
        if result not in ("passed", "skipped") if expected is None else expected not in result:
            print(f"{name}: {result}", flush=True)
    print(f"{passed} cases passed", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
