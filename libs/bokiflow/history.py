"""Finds the outcomes that a fork (a new run) copies from an old run. `Flow.fork` uses it."""

from __future__ import annotations

import msgspec

from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.execution import RETURN
from bokiflow.runs.records import StepDecided
from bokiflow.runs.run_state import RunState


def decided_before(run: RunState, step: str) -> tuple[str, list[StepDecided]]:
    """Return the number of a step, and the outcomes decided before it, in log order.

    The returned outcomes are of epoch 1, the first epoch of the fork, and have no `nth`. A decision
    `RETURN` is omitted: it says that the workflow returned before all operations were awaited, but
    the current code may not return there.

    Args:
        run: the old run.
        step: number or name of the step. A name means the first step with this name.

    Raises:
        FlowSettingsError: the run has no such decided step.
    """
    numbers = list(run.steps)
    named = [number for number, record in run.steps.items() if record.name == step]
    if step not in run.steps and not named:
        decided = [f"{number} {record.name}" for number, record in run.steps.items()]
        raise FlowSettingsError(
            f"The run has no decided step {step!r}. It has, in the order in which they were "
            f"decided: {', '.join(decided)}. If several have the same name, it means the first one."
            if decided
            else f"The run has no decided step {step!r}; it has none."
        )
    number = step if step in run.steps else named[0]
    before = [run.steps[one] for one in numbers[: numbers.index(number)] if one != RETURN]
    return number, [
        msgspec.structs.replace(record, epoch=1, nth=0, status_at=-1) for record in before
    ]
