"""The page over a scripted rack: a real server in a thread, answers by script, and a rack of which any story can be told."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rackserve.api.guard import Guard, Sessions
from rackserve.api.health import Health
from rackserve.api.http import create_app
from rackserve.api.keys import KeyEntry, KeyRing
from rackserve.api.opening import Opening
from rackserve.api.server import listen, serve
from rackserve.base.events import (
    AnyEvent,
    FirstTokenSent,
    PrefillAdmitted,
    QueueChanged,
    RankChanged,
    RequestEnded,
    StepDone,
    TransferDone,
)
from rackserve.base.ids import Rank
from rackserve.base.request import Request
from rackserve.base.units import NS_PER_MS, NS_PER_S
from rackserve.bench.frontier import Curve, OperatingPoint
from rackserve.live.rank_spec import KvUse, RankStatus
from rackserve.live.recorder import Recorded
from rackserve.page.door import Door
from rackserve.page.early import Early
from rackserve.page.feed import Feed
from rackserve.page.routes import page_routes
from rackserve.page.view import RackView
from rackserve.pool.directory import Directory, PoolConfig
from tests.api.rig import Rig, Script

KEY = "rk-right"
KEYS = KeyRing([KeyEntry("person", hashlib.sha256(KEY.encode()).hexdigest())])
PREFILL, DECODE = Rank("prefill0"), Rank("decode0")
CURVE = Curve(
    "a sweep", tuple(OperatingPoint("", n, x, y) for n, x, y in ((1, 70.0, 300.0), (4, 50.0, 900.0), (8, 20.0, 1600.0)))
)


def status(worker: str, role: str, state: str = "up", kv: tuple[KvUse, ...] = (KvUse(30, 70, 100),)) -> RankStatus:
    return RankStatus(worker, role, state, 1, 1, 0, 0.0, -1.0, 5, kv=kv)  # type: ignore[arg-type]


POOL = Directory(PoolConfig(), needs_window=False)
POOL.segment_joined(0, 100, 0, PREFILL)
POOL.counters.hits, POOL.counters.misses = 700, 300
RANKS = (status("prefill0", "prefill"), status("prefill1", "prefill", "down", ()), status("decode0", "decode"))


def ended(total_s: float = 2.5, ttft_s: float = 0.5, prompt: int = 1000, cached: int = 800, output: int = 101) -> RequestEnded:
    return RequestEnded(
        "r", "finished", "stop", 1, prompt, cached, output, int(ttft_s * NS_PER_S), int(total_s * NS_PER_S)
    )  # fmt: skip


def busy_second(n: int) -> list[AnyEvent]:
    """What a rack at work records in its second number `n`, a little different each time."""
    slow = 2.2 + 0.6 * abs((n % 120) - 60) / 60
    return [
        PrefillAdmitted("r", 0, PREFILL, 1000 + 20 * (n % 7), 500, 100 + 30 * (n % 5), 1),
        StepDone(DECODE, n, 60, 1, 1, 60, 40 + n % 13, NS_PER_MS),
        FirstTokenSent("r", 0, int((0.2 + 0.05 * (n % 6)) * NS_PER_S)),
        ended(slow, 0.2 + 0.05 * (n % 6)),
        TransferDone("push", PREFILL, 8, 40_000_000 + 1_000_000 * n, NS_PER_MS),
        TransferDone("fetch", PREFILL, 8, 12_000_000, NS_PER_MS),
        QueueChanged(PREFILL, 3, 2),
        QueueChanged(DECODE, 0, 7),
    ]


def busy_view(now_ns: int, seconds: int = 240) -> RackView:
    """A view of a rack that has been at work for `seconds` until `now_ns`."""
    start = now_ns - seconds * NS_PER_S
    view = RackView(start)
    view.look = lambda: (RANKS, POOL)
    view(Recorded(start, "control", RankChanged(PREFILL, "up", 1)))
    for second in range(seconds):
        for event in busy_second(second):
            view(Recorded(start + second * NS_PER_S, "node", event))
    return view


class Site:
    """A server at `url`. `view` may be told more only through `tell`. `settings` are those of its factory."""

    def __init__(
        self,
        script: Script | Callable[[Request], Script],
        keys: KeyRing,
        view: RackView,
        settings: dict[str, Any],
        *,
        loading: bool,
    ) -> None:
        self._script, self._keys, self.view = script, keys, view
        self._settings, self._loading = settings, loading
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self.thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def start(self) -> None:
        self.thread.start()
        assert self._ready.wait(20)

    def tell(self, *events: AnyEvent) -> None:
        def record() -> None:
            for event in events:
                self.view(Recorded(time.monotonic_ns(), "node", event))

        self._loop.call_soon_threadsafe(record)

    def open(self) -> None:
        """The model is loaded."""
        self._loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        self._opening.open(self.rig.app, self.rig.gateway)
        self.rig.state.loading, self.rig.state.ready = False, True

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(20)
        assert not self.thread.is_alive(), "open pages keep the server from ending"
        self._loop.close()

    async def _serve(self) -> None:
        self.rig = Rig(self._script, **self._settings)
        self.sessions = Sessions()
        state = self.rig.state
        self.feed = Feed(self.view, CURVE, lambda: state.draining)
        pages = page_routes(self.feed, Door(self._keys, self.sessions))
        self.rig.app = create_app(self.rig.gateway, self.rig.factory, self.rig.metrics, state, pages=pages)
        self._opening = Opening(Health(state))
        state.loading, state.ready = self._loading, not self._loading
        if not self._loading:
            self._open()
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        early = Early(self._opening, pages, lambda: state.loading)
        guard = Guard(early, self._keys, self.sessions, hosts=frozenset({"127.0.0.1"}))
        serving = asyncio.create_task(
            serve(guard, listener, gateway=self.rig.gateway, state=state, stop=self._stop, grace_s=1.0)
        )  # fmt: skip
        async with self.rig.app.router.lifespan_context(self.rig.app):
            self._ready.set()
            await serving


@contextmanager
def site(
    script: Script | Callable[[Request], Script],
    keys: Sequence[KeyEntry] | KeyRing = (),
    view: RackView | None = None,
    *,
    loading: bool = False,
    **settings: Any,
) -> Iterator[Site]:
    """A site that is gone when the block is left."""
    ring = keys if isinstance(keys, KeyRing) else KeyRing(list(keys))
    it = Site(script, ring, view or busy_view(time.monotonic_ns()), settings, loading=loading)
    it.start()
    try:
        yield it
    finally:
        it.stop()
