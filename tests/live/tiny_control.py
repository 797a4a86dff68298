"""A control process with two tiny ranks, one that computes and one that may be frozen: prints their ids, then waits."""

from __future__ import annotations

import asyncio
import sys

from tests.live.processes import tiny_rack, until


async def run() -> None:
    async with tiny_rack() as rack:
        rack.tell("prefill0", "compute")
        await until(lambda: "prefill0: computing" in rack.nodes["api"].texts)
        if "freeze" in sys.argv:
            rack.tell("decode0", "freeze")
        print(rack.pid("prefill0"), rack.pid("decode0"), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run())
