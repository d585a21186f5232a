"""Invocations whose outcomes are held until their holder releases them (docs/decisions/0061).

A holder is a run of a workflow. The run calls a function with an idempotency key, and records the
outcome in its own history. Until the run has recorded the outcome, a repeated call must get it,
even after a long time. So held outcomes have no retention, and no other outcome displaces them.
Instead, limits refuse new calls. `InvocationTable` counts held invocations in `HeldInvocations`;
`InvocationService` checks the limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from sortedcontainers import SortedDict

from indilog.base.errors import OverloadedError
from indilog.config import NodeConfig
from indilog.sdk.runs import HOLDER_SEPARATOR
from indilog_compute.invocations.checkpoint import RecordedInvocation
from indilog_compute.invocations.records import application_of

HOLDERS_PAGE: Final = 1000
"""Largest number of holders in one answer."""


class HeldLimits(NamedTuple):
    """Limits on held invocations, whether they are open or ended.

    Attributes:
        total: largest number of held invocations of all applications.
        size: largest number of bytes of the arguments and results of these invocations.
        share: the part of `total` and of `size` that one application may use, between 0 and 1.
    """

    total: int
    size: int
    share: float

    @classmethod
    def of(cls, config: NodeConfig) -> HeldLimits:
        """Return the limits that a configuration sets."""
        invocations = config.invocations
        return cls(
            invocations.held_calls_max,
            invocations.held_bytes_max,
            invocations.app_kept_share_max,
        )


class HeldFor(NamedTuple):
    """The invocations that are held for one holder.

    Attributes:
        holder: the name of the holder.
        calls: number of held invocations.
        size: bytes of the arguments and results of these invocations.
    """

    holder: str
    calls: int
    size: int

    @property
    def run(self) -> tuple[str, str]:
        """The name of the log of the holder's workflow, and the id of its run."""
        log, _, run = self.holder.partition(HOLDER_SEPARATOR)
        return log, run


class HeldInvocations:
    """Keeps and counts the held invocations, by holder.

    Attributes:
        total: number of held invocations.
        size: bytes of the arguments and results of all held invocations.
    """

    def __init__(self) -> None:
        self.total = self.size = 0
        self._by_holder: SortedDict[str, dict[str, RecordedInvocation]] = SortedDict()
        self._count_of: Counter[str] = Counter()
        self._size_of: Counter[str] = Counter()

    def add(self, invocation: RecordedInvocation) -> None:
        """Add an invocation that names its holder."""
        assert invocation.holder, "only held invocations are counted here"
        self._by_holder.setdefault(invocation.holder, {})[invocation.id] = invocation
        self._count(invocation, 1, invocation.size)

    def grow(self, invocation: RecordedInvocation, size: int) -> None:
        """Note that an invocation has `size` bytes more."""
        self._count(invocation, 0, size)

    def remove(self, invocation: RecordedInvocation) -> None:
        """Remove an invocation that is no longer held."""
        held = self._by_holder[invocation.holder]
        del held[invocation.id]
        if not held:
            del self._by_holder[invocation.holder]
        self._count(invocation, -1, -invocation.size)

    def _count(self, invocation: RecordedInvocation, number: int, size: int) -> None:
        application = application_of(invocation.function)
        self.total += number
        self.size += size
        self._count_of[application] += number
        self._size_of[application] += size
        assert self._count_of[application] >= 0, "only counted invocations are removed"
        if not self._count_of[application]:
            assert not self._size_of[application], "no invocation has no bytes"
            del self._count_of[application], self._size_of[application]

    def of(self, holder: str, keys: Iterable[str]) -> Iterator[RecordedInvocation]:
        """Yield the invocations of a holder that have one of `keys`; if `keys` is empty, all
        invocations of the holder.
        """
        wanted = frozenset(keys)
        for held in self._by_holder.get(holder, {}).values():
            if not wanted or held.key in wanted:
                yield held

    def holders(self, prefix: str, after: str) -> list[str]:
        """Return the first holders above `after` whose names begin with `prefix`, ascending; at
        most `HOLDERS_PAGE`.
        """
        found = self._by_holder.irange(
            max(prefix, after), prefix + "\U0010ffff", inclusive=(after < prefix, True)
        )
        return list(islice(found, HOLDERS_PAGE))

    def summary(self, prefix: str, after: str) -> list[HeldFor]:
        """Return the same holders as `holders`, each with the number and the size of its held
        invocations.
        """
        return [
            HeldFor(holder, len(held), sum(one.size for one in held.values()))
            for holder in self.holders(prefix, after)
            for held in (self._by_holder[holder],)
        ]

    def check_room(self, application: str, limits: HeldLimits) -> None:
        """Check that a further call of an application may be held.

        Calls whose records are not read yet do not count, so the limit on calls may be exceeded. An
        accepted call may return a result of any size, so the limit on bytes may be exceeded.

        Raises:
            OverloadedError: a limit is reached.
        """
        calls_max = max(1, int(limits.total * limits.share))
        bytes_max = int(limits.size * limits.share)
        is_full = (
            self.total >= limits.total
            or self.size >= limits.size
            or self._count_of[application] >= calls_max
            or self._size_of[application] >= bytes_max
        )
        if is_full:
            raise OverloadedError(
                f"The outcomes of {self._count_of[application]:,} calls of app {application}, with "
                f"{self._size_of[application]:,} bytes, are held for workflow runs that have not "
                f"recorded them; of all apps {self.total:,} with {self.size:,} bytes. The limits "
                f"are {calls_max:,} with {bytes_max:,} bytes for one app, and {limits.total:,} "
                f"with {limits.size:,} bytes for all (held_calls_max, held_bytes_max, "
                "app_kept_share_max). Let stuck runs end (`indilog runs list`). If their "
                "application is gone, release them: `indilog invocation held`."
            )

    def check_invariants(self) -> None:
        """Assert that the counts agree with the kept invocations."""
        held = [one for of_one in self._by_holder.values() for one in of_one.values()]
        assert self.total == len(held)
        assert self.size == sum(one.size for one in held)
        assert all(
            one.holder == holder for holder, m in self._by_holder.items() for one in m.values()
        )
        assert all(self._by_holder.values()), "a holder holds at least one invocation"
        assert self._count_of == Counter(application_of(one.function) for one in held)
