from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("textual")

from textual.widgets import DataTable, Static

from rackserve.top_screen import TopScreen
from tests.test_top import Stub, work


def text(app: TopScreen, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def test_the_view_follows_the_server_says_when_it_is_gone_and_can_be_held() -> None:
    stub = Stub()

    async def scene() -> None:
        app = TopScreen(stub.server(), 3600)
        async with app.run_test(size=(110, 30)) as pilot:

            async def look() -> None:
                app.look()
                await app.workers.wait_for_complete()
                await pilot.pause()

            await app.workers.wait_for_complete()
            await pilot.pause()
            table = app.query_one("#ranks", DataTable)
            assert text(app, "state") == "ready   open requests 3" and table.row_count == 2
            work(stub.metrics)
            await look()
            assert table.get_row_at(1)[:5] == ["decode0.0", "up", "77", "4", "2"]
            assert "90% cached" in text(app, "flow") and "75% full" in text(app, "pool")
            stub.key = "another"
            await look()
            assert "asks for a key" in text(app, "state") and app.query_one("#state").has_class("bad")
            stub.key = ""
            await pilot.press("space")
            asked = stub.asked
            await look()
            assert stub.asked == asked and app.sub_title.endswith("(held)")
            await pilot.press("space")
            await look()
            assert stub.asked > asked and not app.query_one("#state").has_class("bad")
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(asyncio.wait_for(scene(), 30))
