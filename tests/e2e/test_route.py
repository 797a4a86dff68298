"""`rackserve route` before a live rack that publishes its KV events: the router knows what the rack holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec

from rackserve.api.server import listen, serve
from rackserve.base.keys import count
from rackserve.base.topology import Topology
from rackserve.config import ServerConfig, Settings
from rackserve.live.runner import RunnerSpec
from rackserve.relay.config import RouteConfig, Waits, WorkerConfig
from rackserve.relay.http import create_app
from rackserve.relay.relay import Relay
from rackserve.serving import open_server
from tests.e2e.rig import VOCABULARY
from tests.live.processes import until

TOPOLOGY = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=64, decode_blocks=48, segment_blocks=64)
BLOCK = 16


async def scene(folder: Path) -> None:
    events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    settings = Settings(
        topology=TOPOLOGY,
        runner=RunnerSpec(vocab_size=VOCABULARY),
        server=ServerConfig(port=0, kv_events=events, kv_replay=replay),
    )
    async with open_server(settings) as server, httpx.AsyncClient(timeout=20, trust_env=False) as client:
        early = [number % VOCABULARY for number in range(3, 83)]
        first = await client.post(server.url + "/v1/completions", json={"prompt": early, "max_tokens": 2})
        assert first.status_code == 200
        worker = WorkerConfig(server.url, events=events, replay=replay)
        waits = Waits(probe=0.2, head=20, gap=20, total=30, grace=5)
        relay = Relay(RouteConfig(workers=(worker,), tokenizer="numbers", block_tokens=BLOCK, waits=waits))
        listener, stop = listen("127.0.0.1", 0), asyncio.Event()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        serving = asyncio.create_task(serve(create_app(relay), listener, gateway=relay, state=relay, stop=stop, grace_s=5))
        try:
            await until(lambda: relay.is_ready)

            def held(tokens: list[int]) -> int:
                chain = relay.reader.read("/v1/completions", msgspec.json.encode({"prompt": tokens}), {}).chain
                blocks = relay.placer.index.match(chain).get(worker.ranks[0], 0)
                assert blocks <= count(chain)
                return blocks

            await until(lambda: held(early) == len(early) // BLOCK)  # from before the router was there
            prompt = [*early, *(number % VOCABULARY for number in range(200, 260))]
            answer = (await client.post(url, json={"prompt": prompt, "max_tokens": 40})).json()
            assert "usage" in answer, answer
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 * BLOCK
            assert relay.metrics.predicted.labels(worker.name)._value.get() == 5 * BLOCK
            whole = [*prompt, *map(int, answer["choices"][0]["text"].split())]
            await until(lambda: held(whole) >= (len(whole) - 1) // BLOCK)  # the output's blocks too
        finally:
            stop.set()
            await serving


def test_a_router_before_the_rack_knows_what_it_holds(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(scene(tmp_path), 90))
