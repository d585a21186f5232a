"""A public function that another service calls over HTTP; a delivery that is repeated runs once.

Prints:
    first delivery: 200 payment 1
    the same again: 200 payment 1
    recorded: 1
"""

from __future__ import annotations

import asyncio
import os

import httpx

import indilog

app = indilog.App("webhook")


@app.function(public=True)
async def paid(ctx: indilog.Context, amount: int) -> str:
    """Record a payment; return its number. Callers need no token."""
    payments = ctx.log("payments")
    await payments.append(str(amount).encode())
    return f"payment {len(await payments.read_range())}"


async def main() -> None:
    """Deploy this file, and deliver one payment twice."""
    url = os.environ.get("INDILOG_URL", "http://localhost:8080")
    async with indilog.connect(url) as client:
        await client.deploy(__file__)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as service:
            for what in ("first delivery", "the same again"):
                answer = await service.post(
                    "/functions/webhook/paid",
                    json={"amount": 12},
                    headers={"Idempotency-Key": "delivery-7"},
                )
                print(f"{what}: {answer.status_code} {answer.json()}")
        print("recorded:", len(await client.log("payments").read_range()))


if __name__ == "__main__":
    asyncio.run(main())
