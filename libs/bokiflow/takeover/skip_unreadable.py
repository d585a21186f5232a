"""Skips a run that cannot be taken over, so that it does not delay the others."""

from __future__ import annotations

from typing import Self

import structlog

from bokiflow.runs.run_log import is_transient
from indilog import IndilogError


class SkipUnreadable:
    """Context manager for the takeover of one run. An error that is not transient is logged, not
    raised.

    Attributes:
        failed: whether there was an error that is not transient.
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
