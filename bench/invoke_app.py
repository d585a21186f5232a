"""The application of `bench.invoke`: a no-op, an append, and a durable increment."""

from __future__ import annotations

import indilog
from bokistore import Store

app = indilog.App("bench")


@app.function
async def noop(ctx: indilog.Context) -> None:
    """Do nothing."""


@app.function
async def append(ctx: indilog.Context, name: str) -> int:
    """Append one record; return its seqnum."""
    return await ctx.log("bench").append(b"x" * 64, tags=(name,))


@app.function
async def counter(ctx: indilog.Context, name: str) -> int:
    """Increment a durable counter; return what it was before."""
    before = await Store(ctx.log("bench")).increment(f"counter:{name}", "value", 1)
    return before if isinstance(before, int) else 0
