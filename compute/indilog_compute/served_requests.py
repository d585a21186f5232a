"""Ensures that this node executes each request of another compute node at most once.

The requests are conditional appends (`ConditionalAppends`) and appends to logs that this node owns
(`OwnerAppends`). The answers of the newest requests are kept, to answer copies of a request.
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

_REQUESTS_KEPT: Final = 4096
"""How many requests of one sender are kept with their answers: the newest ones."""


class _HasRequest(Protocol):
    """An answer to a request."""

    @property
    def request(self) -> int:
        """The number of the answered request."""


_AnswerT = TypeVar("_AnswerT", bound=_HasRequest)


class ServedRequests(Generic[_AnswerT]):
    """The newest requests of one sender, with their answers."""

    def __init__(self) -> None:
        self._answers: dict[int, _AnswerT | None] = {}
        self._forgotten = -1
        """The greatest number of a request that is no longer kept; -1: all are kept."""

    def begin(self, request: int) -> bool:
        """Note a request; return whether the caller must execute it, because it is new."""
        if self.knows(request):
            return False
        self._answers[request] = None
        if len(self._answers) > _REQUESTS_KEPT:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._forgotten = max(self._forgotten, oldest)
        return True

    def knows(self, request: int) -> bool:
        """Whether a request was noted before. A request also counts as noted if its number is not
        greater than that of a request that is no longer kept.
        """
        return request in self._answers or request <= self._forgotten

    def end(self, answer: _AnswerT) -> None:
        """Keep an answer for copies of its request."""
        if answer.request in self._answers:
            self._answers[answer.request] = answer

    def answer(self, request: int) -> _AnswerT | None:
        """Return the answer to a request; None: the request is not finished, or is not kept."""
        return self._answers.get(request)
