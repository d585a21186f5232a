"""Advice for people about a run that does not continue by itself. `inspection` shows it."""

from __future__ import annotations

from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State


def advice_for(id: str, run: RunState) -> str | None:  # noqa: A002
    """Return what people can do about a run that does not continue by itself; None: nothing."""
    if run.parked is not None and run.crashes:
        return (
            "It is executed again after a pause. Deploy code or give workers memory so that the "
            f"step does not end its process, then `indilog runs retry {id}`; or end the run: "
            f"`indilog runs cancel {id}`."
        )
    if run.parked is not None:
        return (
            "Deploy code that does the decided steps first, then it continues by itself; or "
            f"continue with the deployed code: `indilog runs fork {id} STEP`; or end it: `indilog "
            f"runs cancel {id}`."
        )
    if run.state is State.FAILED:
        return f"It has ended. To do a step again in a new run: `indilog runs fork {id} STEP`."
    return None
