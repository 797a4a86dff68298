"""rackserve's front end before an engine that costs nothing: `python frontend_ours.py FOLDER IDS` prints its port and serves.

Everything from the socket to the engine is what `rackserve serve` runs, the frontend node included; the router's part is to say
yes. FOLDER holds tokenizer and template, IDS is a file with the JSON list of the token ids that answers go through.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

from frontend_floor import Beat, Due

from rackserve.api.admission import Admission
from rackserve.api.factory import RequestFactory
from rackserve.api.gateway import Gateway
from rackserve.api.guard import LOOPBACK, Guard, Sessions
from rackserve.api.health import Health
from rackserve.api.http import create_app
from rackserve.api.journal import Journal, RefusalLog
from rackserve.api.keys import KeyRing
from rackserve.api.limits import Limits
from rackserve.api.metrics import Metrics
from rackserve.api.opening import Opening
from rackserve.api.server import listen, serve
from rackserve.api.state import ServerState
from rackserve.base.ids import FRONTEND, ROUTER, NodeId, Rank
from rackserve.base.keys import CacheNamespace
from rackserve.base.messages import Message, Place, TokensEmitted
from rackserve.live.clock import LiveClock
from rackserve.live.host import LiveHost
from rackserve.live.recorder import FanOut, NodeRecorder
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.frontend import Frontend, FrontendConfig
from rackserve.nodes.ports import Ports
from rackserve.text.chat import ChatTemplate
from rackserve.text.tokenizer import Tokenizer

MODEL = "tiny"
MAX_MODEL_LEN = 131_072


class Rack:
    """Node `router` and all behind it: places nothing, emits `ids` in turn."""

    def __init__(self, host: LiveHost, ids: list[int]) -> None:
        self._host = host
        self._ids = ids
        self._beat = Beat(self._emit)

    def handle(self, message: Message) -> None:
        if isinstance(message, Place):
            self._beat.add(message.request.id, message.request.max_tokens)

    def _emit(self, due: Due) -> None:
        rank = Rank("decode-0", 0)
        for request, index, last in due:
            token = self._ids[index % len(self._ids)]
            self._host.post(FRONTEND, TokensEmitted(request, 1, rank, index, (token,), 0, "length" if last else None))


class Local:
    """The transport within one process."""

    def __init__(self, host: LiveHost) -> None:
        self._host = host

    def send(self, to: NodeId, message: Message) -> None:
        self._host.post(to, message)


async def run(folder: Path, ids: list[int]) -> None:
    host = LiveHost(asyncio.get_running_loop(), lambda error: print(repr(error), file=sys.stderr))
    metrics, journal, state = Metrics(), Journal(), ServerState(ready=True)
    events = FanOut([lambda recorded: metrics.record(recorded.event), journal])
    gateway = Gateway(Local(host))
    host.add("api", gateway)
    host.add(ROUTER, Rack(host, ids))
    ports = Ports(LiveClock(host, FRONTEND), Local(host), NodeRecorder(events, FRONTEND))
    host.add(FRONTEND, Frontend(FrontendConfig(), Deadlines(), ports))
    factory = RequestFactory(
        Tokenizer.from_folder(folder),
        CacheNamespace(MODEL, "0", 64, "dense"),
        max_model_len=MAX_MODEL_LEN,
        models=(MODEL,),
        template=ChatTemplate.from_folder(folder),
        limits=Limits(preparing=256),
    )
    app = create_app(gateway, factory, metrics, state, [journal])
    opening = Opening(Health(state))
    guard = Guard(
        Admission(opening, 10_000, count=metrics.error_sent), KeyRing.open("", ""), Sessions(), hosts=frozenset(LOOPBACK)
    )
    listener = listen("127.0.0.1", 0)
    async with app.router.lifespan_context(app):
        opening.open(app, gateway)
        print(listener.getsockname()[1], flush=True)
        await serve(RefusalLog(guard, metrics.error_sent), listener, gateway=opening, state=state, stop=asyncio.Event())


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(run(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
