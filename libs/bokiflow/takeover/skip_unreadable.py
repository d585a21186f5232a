"""One run that cannot be taken over does not hold up the others."""

from __future__ import annotations

from typing import Self

import structlog

from bokiflow.runs.run_log import is_transient
from indilog import IndilogError


class SkipUnreadable:
    """What is wrong with one run for good is logged, so that it does not hold up the others.

    Attributes:
        failed: whether anything was.
    """

    def __init__(self, run: str) -> None:
        self.failed = False
        self._run = run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self.failed = isinstance(error, IndilogError) and not is_transient(error)
        if self.failed:
            structlog.get_logger().error(
                "run cannot be taken over", run=self._run, reason=str(error)
            )
        return self.failed
