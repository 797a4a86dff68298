"""The key file of a running server: read again on SIGHUP, without a word lost of the answers that are being given."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx

from rackserve.api.keys import new_key
from tests.e2e.rig import cold, complete, prompt, serve, stream, until


def test_keys_come_and_go_while_an_answer_streams(tmp_path: Path, digest: list[str]) -> None:
    path = tmp_path / "keys.toml"
    (first, first_entry), (second, second_entry) = new_key("first", "a"), new_key("second", "b")
    path.write_text(first_entry)
    ids = prompt("long", 600)

    async def work(client: httpx.AsyncClient) -> None:
        def asked_with(key: str) -> dict[str, str]:
            client.headers["authorization"] = f"Bearer {key}"
            return {}

        async def status_of(key: str) -> int:
            asked_with(key)
            return (await complete(client, prompt("short", 20), 1)).status

        assert (await status_of(first), await status_of(second)) == (200, 401)
        asked_with(first)
        begun = asyncio.Event()
        running = asyncio.create_task(stream(client, ids, 1_500, lambda count: begun.set()))
        await begun.wait()
        path.write_text(second_entry)
        rack.command.signal(signal.SIGHUP)

        async def taken_over() -> bool:
            return await status_of(second) == 200

        await until(taken_over, 10, "the new key is known")
        assert await status_of(first) == 401, "and the old one is not"
        assert rack.command.said("the key file was read again").strip().endswith("keys: 1, gone: 1")
        path.write_text("[[keys")
        rack.command.signal(signal.SIGHUP)

        async def complained() -> bool:
            return "not taken over" in rack.command.errors

        await until(complained, 10, "the server says why")
        assert await status_of(second) == 200
        answer = await running
        assert answer.error == "" and answer.tokens == cold(ids, 1_500)

    with serve(tmp_path, *digest, "--set", f"security.key_file={path}") as rack:
        rack.run(work)
    assert "keys.toml" in rack.command.errors
