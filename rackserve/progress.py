"""What a live run is doing, on standard error: a moving line on a terminal, elsewhere one line now and then."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

LINE_EVERY_S = 10.0
"""Off a terminal no two lines come closer than this, but for the last one."""

REFRESH_S = 0.25


async def show_progress(label: str, total: int | None, count: Callable[[], int], text: Callable[[float], str]) -> None:
    """Show `count()` of `total` (None: unknown) and `text(seconds since the beginning)` until cancelled, and once more then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console, loop = Console(stderr=True), asyncio.get_running_loop()
    started = last = loop.time()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())

    def line() -> str:
        return f"{label}: {loop.time() - started:.0f} s, {text(loop.time() - started)}"

    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=total)
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                progress.update(task, completed=count(), description=f"{label}: {text(loop.time() - started)}")
                if not console.is_terminal and loop.time() - last >= LINE_EVERY_S:
                    last = loop.time()
                    print(line(), file=sys.stderr, flush=True)
        finally:
            progress.update(task, completed=count())
            if not console.is_terminal:
                print(line(), file=sys.stderr, flush=True)
