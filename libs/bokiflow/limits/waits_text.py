"""Says for people why a run waits for its turn. `inspection` and `run_lists` show the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bokiflow.limits.limit import rate_text
from bokiflow.limits.limit_state import LimitState
from indilog.sdk.runs import RunWait

_SHOWN: Final = 3
"""Number of runs with a turn that are named."""


def turn_wait(name: str, state: LimitState, id_: str, *, is_brief: bool = False) -> RunWait | None:
    """Return the wait of a run for its turn; None: the run does not wait for a turn.

    Args:
        name: name of the limit.
        state: the runs of the limit.
        id_: id of the run.
        is_brief: whether to leave out the number of runs before the run. Counting takes time in
            proportion to that number.
    """
    why = state.why_waits(id_, counts=not is_brief)
    if why is None:
        return None
    key = state.runs[id_].key
    whose = repr(f"{name.rstrip('@')}:{key}" if key and not why.is_total else name.rstrip("@"))
    if why.places is None:
        text = f"rate {rate_text(state.settings)} of {whose}"
    else:
        what = "total concurrency" if why.is_total else "concurrency"
        having = _ids(why.having)
        text = f"{what} {whose} ({len(why.having)} of {why.places} running: {having})"
    if not why.before:
        return RunWait(what=text, until=why.due)
    others = "run" if why.before == 1 else "runs"
    return RunWait(what=f"{text}, after {why.before:,} other {others}")


def _ids(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN:,} more" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more
