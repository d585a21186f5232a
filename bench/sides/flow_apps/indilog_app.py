"""IndiLog's side of `bench.flow_peers`."""

from __future__ import annotations

import bokiflow
import indilog
from bokiqueue import Queue
from bokistore import Store

STEPS = 5

app = indilog.App("bench")
flow = bokiflow.Flow(app)


async def step(number: int) -> int:
    """Do what a step does: nothing, but its result is kept."""
    return number + 1


@flow.workflow
async def nothing(wf: bokiflow.Workflow, number: int) -> int:
    """Do nothing, durably."""
    return number


@flow.workflow
async def steps(wf: bokiflow.Workflow, number: int) -> int:
    """Run the steps one after the other."""
    for _ in range(STEPS):
        number = await wf.step(step, number)
    return number


@app.function
async def noop(ctx: indilog.Context, number: int) -> int:
    """Run a workflow that does nothing."""
    handle = await nothing.start(number)
    return await handle.result()


@app.function
async def five_steps(ctx: indilog.Context, number: int) -> int:
    """Run a workflow of five steps."""
    handle = await steps.start(number)
    return await handle.result()


@app.function
async def increment(ctx: indilog.Context, name: str) -> int:
    """Add to the counter of that name; return what it was before."""
    before = await Store(ctx.log("bench")).increment(f"counter:{name}", "value", 1)
    return before if isinstance(before, int) else 0


@app.function
async def round_trip(ctx: indilog.Context, number: int) -> int:
    """Push a message, pop one, which may be another caller's, and acknowledge it."""
    queue = Queue(ctx.log("bench"), "mail", shards=4)
    await queue.push(b"%d" % number)
    async with queue.pop(wait=30) as message:
        return -1 if message is None else int(message.data)
