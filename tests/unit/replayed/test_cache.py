"""Libraries over a log say what they need when they get something else."""

from __future__ import annotations

from typing import Any

import pytest

from bokiqueue import Queue
from bokistore import Store
from bokistream import Streams
from bokiviews import Views
from indilog.replayed import ReplicaCache
from indilog.testing import MemoryLogs


@pytest.mark.parametrize("make", [Store, Streams, Views, lambda log: Queue(log, "jobs")])
@pytest.mark.parametrize("given", [MemoryLogs(), "orders"], ids=["the platform", "a name"])
def test_what_is_no_log_is_refused_in_one_sentence(make: Any, given: object) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match=r"Give a log, such as client.log\(\"orders\"\), not \w+\."):
        make(given)


def test_the_least_recently_used_replica_is_dropped() -> None:
    cache: ReplicaCache[list[int]] = ReplicaCache(2)
    log = MemoryLogs().log("orders")
    first, second = cache.get(log, 1, lambda: [1]), cache.get(log, 2, lambda: [2])
    assert cache.get(log, 1, list) is first
    cache.get(log, 3, lambda: [3])
    assert cache.get(log, 1, list) is first
    assert cache.get(log, 2, list) is not second
