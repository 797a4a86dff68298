from __future__ import annotations

import asyncio

import pytest

from rackserve.progress import LINE_EVERY_S, show_progress
from tests.bench.toys import VirtualLoop


def watched(seconds: float) -> None:
    """Show the progress of a run that does 7 things a second, for so many seconds of virtual time."""
    loop = VirtualLoop()

    async def run() -> None:
        bar = asyncio.create_task(
            show_progress("live a", 700, lambda: round(7 * loop.time()), lambda s: f"{7 * s:.0f} of 700 requests sent")
        )
        await asyncio.sleep(seconds)
        bar.cancel()
        await asyncio.gather(bar, return_exceptions=True)

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_off_a_terminal_lines_come_at_a_bounded_rate(capsys: pytest.CaptureFixture[str]) -> None:
    watched(99.9)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and len(lines) <= 99.9 / LINE_EVERY_S + 1
    assert lines[0] == "live a: 10 s, 70 of 700 requests sent"


def test_the_last_line_tells_where_a_run_ended_however_short_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    watched(1.0)
    assert capsys.readouterr().err.splitlines() == ["live a: 1 s, 7 of 700 requests sent"]
