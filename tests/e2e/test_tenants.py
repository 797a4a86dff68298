"""Tenants of one rack, each with its key: none learns from the cache what another has asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from rackserve.api.keys import new_key
from tests.e2e.rig import Answer, cold, complete, prompt, serve

PAIRS = 200
AT_ONCE = 10
LENGTH = 300


def test_no_prompt_of_a_tenant_is_cached_for_another(tmp_path: Path, digest: list[str]) -> None:
    """Also not where the other asks for the same salt, or names the first tenant in it."""
    keys, path = {}, tmp_path / "keys.toml"
    for tenant in ("a", "b"):
        keys[tenant], entry = new_key(tenant, tenant)
        with path.open("a") as file:
            file.write(entry)
    salts: tuple[dict[str, str], ...] = ({}, {"cache_salt": "x"}, {"cache_salt": "a"})

    async def work(client: httpx.AsyncClient) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def ask(tenant: str, number: int) -> Answer:
            return await complete(clients[tenant], prompt(f"pair {number}", LENGTH), 2, **salts[number % 3])

        async def pair(number: int) -> tuple[Answer, Answer, Answer]:
            async with places:
                return await ask("a", number), await ask("b", number), await ask("a", number)

        clients = {
            tenant: httpx.AsyncClient(
                base_url=client.base_url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False
            )
            for tenant, key in keys.items()
        }
        answers = await asyncio.gather(*(pair(number) for number in range(PAIRS)))
        for number, (first, other, again) in enumerate(answers):
            assert first.tokens == other.tokens == again.tokens == cold(prompt(f"pair {number}", LENGTH), 2)
            assert (first.cached, other.cached) == (0, 0) and again.cached > LENGTH // 2
        for each in clients.values():
            await each.aclose()

    with serve(tmp_path, *digest, "--set", f"security.key_file={path}") as rack:
        rack.run(work)
