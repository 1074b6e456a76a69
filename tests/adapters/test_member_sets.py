"""Process sets that only their members add."""

from __future__ import annotations

import threading
from typing import Any

from sirtaki.torch.backend.submission import set_of


class SlowContext:
    """A rank whose queue takes the first submission slowly, so that a second one would come meanwhile."""

    rank, size = 0, 4

    def __init__(self) -> None:
        self.member_sets: dict[tuple[int, ...], Any] = {}
        self.submissions: list[Any] = []
        self.is_second = threading.Event()

    def enqueue(self, batch: Any) -> None:
        self.submissions.append(batch)
        if len(self.submissions) == 1:
            self.is_second.wait(0.5)
        else:
            self.is_second.set()


def test_threads_that_create_groups_of_the_same_ranks_add_one_set() -> None:
    context: Any = SlowContext()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(set_of(context, [0, 2]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(context.submissions) == 1
    assert len(found) == 3
    assert found[0] is found[1] is found[2]
