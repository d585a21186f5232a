"""Restate's side of `bench.flow_peers`, with its SDK for Python; served by Hypercorn."""

from __future__ import annotations

import restate

STEPS = 5

bench = restate.Service("bench")
counter = restate.VirtualObject("counter")


async def step(number: int) -> int:
    """Do what a step does: nothing, but its result is kept."""
    return number + 1


@bench.handler()
async def noop(ctx: restate.Context, number: int) -> int:
    """Do nothing."""
    return number


@bench.handler()
async def workflow(ctx: restate.Context, number: int) -> int:
    """Run the steps one after the other."""
    for turn in range(STEPS):
        number = await ctx.run_typed(f"step {turn}", step, number=number)
    return number


@counter.handler()
async def increment(ctx: restate.ObjectContext, number: int) -> int:
    """Add to the counter that the key names; return what it was before."""
    before = await ctx.get("value", type_hint=int) or 0
    ctx.set("value", before + number)
    return before


app = restate.app(services=[bench, counter])
