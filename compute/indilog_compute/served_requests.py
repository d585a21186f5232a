"""The requests of another compute node that this node executes, each at most once: conditional
appends (`conditional`) and appends to logs that this node owns (`owner_appends`).
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

_REQUESTS_KEPT: Final = 4096
"""Newest requests of one sender whose answers are kept."""


class _HasRequest(Protocol):
    """An answer."""

    @property
    def request(self) -> int:
        """The number of its request."""


_AnswerT = TypeVar("_AnswerT", bound=_HasRequest)


class ServedRequests(Generic[_AnswerT]):
    """The newest requests of one sender, with their answers; each is executed at most once."""

    def __init__(self) -> None:
        self._answers: dict[int, _AnswerT | None] = {}
        self._forgotten = -1
        """The greatest request whose answer is not kept any more."""

    def begin(self, request: int) -> bool:
        """Note a request; return whether it is new, so that it may be executed."""
        if self.knows(request):
            return False
        self._answers[request] = None
        if len(self._answers) > _REQUESTS_KEPT:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._forgotten = max(self._forgotten, oldest)
        return True

    def knows(self, request: int) -> bool:
        """Whether a request was noted before; all requests before the kept ones count as noted."""
        return request in self._answers or request <= self._forgotten

    def end(self, answer: _AnswerT) -> None:
        """Keep an answer for copies of its request."""
        if answer.request in self._answers:
            self._answers[answer.request] = answer

    def answer(self, request: int) -> _AnswerT | None:
        """Return the answer to a request; None: the request is not finished, or not known."""
        return self._answers.get(request)
