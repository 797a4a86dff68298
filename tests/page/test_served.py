"""The page of a real rack: processes, one pool, an answer whose next turn finds its prefix, and the rack that tells of it."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import httpx
import pytest

from rackserve.base.errors import FileFormatError
from rackserve.base.topology import Topology
from rackserve.config import ServerConfig, Settings
from rackserve.live.runner import RunnerSpec
from rackserve.serving import open_server
from tests.page.chrome import browser
from tests.report.browser import needs_browser
from tests.text.small_model import small_tokenizer, write_folder

SMALL = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=64, decode_blocks=48, segment_blocks=16)


def chatting(folder: Path, **server: object) -> Settings:
    write_folder(folder)
    served = ServerConfig(**{"port": 0, "tokenizer": str(folder), **server})  # type: ignore[arg-type]
    return Settings(topology=SMALL, runner=RunnerSpec(vocab_size=small_tokenizer().vocab_size), server=served)


def look(folder: Path, url: str) -> tuple[str, str]:
    """What the page says below the second answer, and of the rack."""
    with browser(folder) as tab:
        tab.resize(1200, 1300)
        tab.go(f"{url}/")
        tab.until("document.querySelector('.bar option')")
        tab.run("document.querySelector('.settings').open = true")
        tab.type(".settings label:nth-child(2) input", "20")
        for number, question in enumerate(("q" * 60, "w"), 1):
            tab.type("#draft", question)
            tab.press("Enter")
            tab.until(f"document.querySelectorAll('.facts').length === {number}")
        told = tab.run("[...document.querySelectorAll('.facts')].at(-1).innerText")
        tab.run("location.hash = 'rack'")
        tab.until("document.querySelector('.now')")  # requests have finished, and a period was closed since
        tab.shoot(folder / "served.png")
        assert tab.complaints == []
        return told, tab.run("document.querySelector('#rack').innerText")


@needs_browser
def test_the_page_of_a_rack_tells_what_was_reused_and_shows_its_ranks(tmp_path: Path) -> None:
    async def scene() -> tuple[str, str]:
        async with open_server(chatting(tmp_path)) as server:
            return await asyncio.to_thread(look, tmp_path, server.url)

    facts, rack = asyncio.run(asyncio.wait_for(scene(), 90))
    prompt, reused, computed = (int(re.search(rf"{name}\n(\d+)", facts)[1]) for name in ("Prompt", "Reused", "Computed"))  # type: ignore[index]
    assert prompt == reused + computed > 80 and reused >= 64 and "Answer\n20 tokens" in facts and "Model\ndigest" in facts
    assert "prefill0.0" in rack and "decode0.0" in rack and "1 of 1 up" in rack and "The pool holds" in rack


def test_the_page_of_a_rack_is_there_before_its_ranks_are(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def scene() -> None:
        settings = chatting(tmp_path, port=port)

        async def start() -> None:
            async with open_server(settings):
                pass

        starting = asyncio.create_task(start())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            statuses: dict[str, int] = {}
            paths = ("/ready", "/", "/page/chat.js", "/v1/models")
            while not statuses and not starting.done():
                try:
                    statuses = {path: (await client.get(path)).status_code for path in paths}
                except httpx.ConnectError:
                    await asyncio.sleep(0.005)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert statuses == {"/ready": 503, "/": 200, "/page/chat.js": 200, "/v1/models": 503}

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_frontier_that_is_none_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")

    async def scene() -> None:
        async with open_server(chatting(tmp_path, frontier=str(tmp_path / "x.json"))):
            pytest.fail("it started")

    with pytest.raises(FileFormatError, match=r"x\.json"):
        asyncio.run(scene())
