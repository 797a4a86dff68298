"""A live rack with its HTTP front end, in one process plus one per rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.types import ASGIApp

from rackserve.api.admission import Admission
from rackserve.api.factory import RequestFactory
from rackserve.api.gateway import Gateway
from rackserve.api.guard import Guard, Sessions, keys_at, names_at
from rackserve.api.health import Health
from rackserve.api.holdings import Holding
from rackserve.api.http import create_app
from rackserve.api.journal import Journal, RefusalLog, Witness
from rackserve.api.keys import KEY_VARIABLE, KeyRing
from rackserve.api.logs import FIELDS
from rackserve.api.metrics import Metrics
from rackserve.api.opening import Opening
from rackserve.api.server import listen, serve
from rackserve.api.state import ServerState
from rackserve.api.tracing import LINGER_S, open_tracer
from rackserve.base.errors import ConfigError, RackserveError, RequestError
from rackserve.base.events import RankChanged
from rackserve.base.ids import POOL_RANK, NodeId, Rank
from rackserve.base.keys import CacheNamespace
from rackserve.base.kv_layout import KvLayout
from rackserve.base.request import Constraint
from rackserve.bench.frontier import read_curve
from rackserve.config import Settings
from rackserve.live.kv_announcer import KvAnnouncer
from rackserve.live.kv_events import KvPublisher
from rackserve.live.rack import LiveRack
from rackserve.live.rank_spec import RankStatus
from rackserve.live.recorder import Recorded, Sink
from rackserve.live.runner import unsupported
from rackserve.live.stalls import StallWatch
from rackserve.page.door import Door
from rackserve.page.early import Early
from rackserve.page.feed import Feed
from rackserve.page.routes import page_routes
from rackserve.page.view import RackView
from rackserve.pool.directory import Directory
from rackserve.ports import Node, Transport
from rackserve.text.chat import ChatTemplate
from rackserve.text.constraints import ConstraintCompiler
from rackserve.text.dsml import DsmlTemplate
from rackserve.text.numbers import NumberTokenizer
from rackserve.text.parsers import ParserChoice
from rackserve.text.tokenizer import Tokenizer, Vocabulary

log = logging.getLogger("rackserve.serving")

API: NodeId = "api"


class Tap(Protocol):
    """Sees what passes between the HTTP front end and the frontend node: a transcript, or a recording of the traffic."""

    def around_node(self, node: Node) -> Node: ...

    def around_transport(self, transport: Transport) -> Transport: ...


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: the text side of a model, and the namespace of its KV."""

    tokenizer: Vocabulary
    template: ChatTemplate | DsmlTemplate | None
    names: tuple[str, ...]
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    namespace: CacheNamespace


@dataclass(frozen=True, slots=True)
class OpenServer:
    """A server that answers. `stop` is set once it is told to end, or when its front end has ended by itself.

    reload_keys  read the key file again; open answers go on
    """

    url: str
    rack: LiveRack
    metrics: Metrics
    served: Served
    stop: asyncio.Event
    keys: KeyRing
    reload_keys: Callable[[], None]


def describe_model(settings: Settings, layout: KvLayout) -> Served:
    """Tokenizer, template and limits of the model that `settings` name. Reads files; not for the event loop.

    A model without a tokenizer is spoken to in numbers, the ids of its tokens.
    """
    spec, topology = settings.runner, settings.topology
    room = min(topology.prefill_blocks, topology.decode_blocks) * layout.block_tokens
    folder: Path | None = None
    eos_ids: tuple[int, ...] = ()
    if spec.kind == "digest":
        name, revision, context, vocab_size = "digest", "0", room, spec.vocab_size
    else:
        from rackserve.model.files import open_model

        files = open_model(spec.model)
        folder, name, revision = files.path if files.tokenizer_path else None, files.name, files.revision
        context, vocab_size, eos_ids = files.config.max_positions, files.config.vocab_size, files.eos_ids
    if settings.server.tokenizer:
        folder = Path(settings.server.tokenizer)
    tokenizer = Tokenizer.from_folder(folder) if folder else NumberTokenizer(vocab_size, eos_ids)
    if spec.kind != "digest" and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} token ids, the model {vocab_size}; use that of this model"
        )
    template: ChatTemplate | DsmlTemplate | None = None
    if spec.kind == "llama":
        template = ChatTemplate.from_folder(files.path, trusted=settings.server.trust_template)
    elif spec.kind == "digest" and folder:
        template = ChatTemplate.from_folder(folder)
    elif spec.kind == "deepseek_v41" and folder:
        template = DsmlTemplate()
    limit = min(context, room)
    if settings.server.max_model_len > limit:
        raise ConfigError(
            f"server.max_model_len is {settings.server.max_model_len}: the model has {context} positions and a rank's blocks "
            f"hold {room} (raise topology.prefill_blocks and topology.decode_blocks)"
        )
    numbers = f"rounded:{spec.activation_rounding}" if spec.kind == "deepseek_v41" else spec.dtype
    namespace = CacheNamespace(name, revision, layout.block_tokens, f"{numbers}|{layout.fingerprint()}")
    names = (settings.server.served_model_name or name,)
    return Served(tokenizer, template, names, eos_ids, vocab_size, settings.server.max_model_len or limit, namespace)


@contextlib.asynccontextmanager
async def open_server(settings: Settings, sinks: Sequence[Sink] = (), tap: Tap | None = None) -> AsyncIterator[OpenServer]:
    """A rack and its front end, ready to answer; both are gone when the block is left, however it is left.

    Left in good order, open answers get `server.grace` seconds to end; left by an exception, they end with an error at once.
    While the rack starts, /live is well and all else gets 503. `sinks` get every recorded event, `tap` every request and its
    output.
    """
    keys = open_keys(settings)
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(contextlib.closing(listen(settings.server.host, settings.server.port)))
        announcer = _open_events(settings, closing)
        taps: list[Tap] = [each for each in (tap, announcer) if each is not None]
        seen = _Seen(settings, closing)
        rack = LiveRack(
            settings.rack,
            settings.engine,
            sinks=[*seen.sinks, *sinks],
            supervisor=settings.supervisor,
            around_router=None if announcer is None else announcer.around_router,
        )
        state = seen.look_at(rack)
        opening = Opening(Health(state))
        sessions = Sessions()
        pages = page_routes(Feed(seen.view, seen.curve, lambda: state.draining), Door(keys, sessions))
        early = Early(opening, pages, lambda: state.loading)
        admission = Admission(
            early, settings.limits.tenant_requests, count=seen.metrics.error_sent, is_full=lambda: rack.is_full
        )
        hosts = names_at(settings.server.host, settings.security.hosts)
        guard = Guard(admission, keys, sessions, hosts=hosts, open_metrics=settings.security.open_metrics)
        stop = asyncio.Event()
        running = _start_serving(
            RefusalLog(guard, seen.metrics.error_sent), listener, opening, state, stop, rack, settings.server.grace
        )
        try:
            async with rack:
                served = await asyncio.to_thread(describe_model, settings, rack.layout)
                seen.metrics.vllm_names.model = served.names[0]
                if announcer is not None:
                    announcer.speak_of(served.namespace)
                gateway = _add_gateway(settings, rack, taps)
                app = create_app(gateway, _factory_of(settings, served), seen.metrics, state, seen.witnesses, pages)
                async with app.router.lifespan_context(app):
                    opening.open(app, gateway)
                    state.loading, state.ready = False, _can_serve(rack.status())
                    try:
                        yield OpenServer(
                            _url(listener), rack, seen.metrics, served, stop, keys, partial(_reload, keys, sessions)
                        )
                        stop.set()
                        await asyncio.wait((running,))  # unlike `await running`, does not cancel it when we are
                        running.result()
                    except BaseException:
                        opening.close("the server was interrupted")
                        await _cancel(running)
                        raise
        finally:
            await _cancel(running)


def _start_serving(
    app: ASGIApp,
    listener: socket.socket,
    opening: Opening,
    state: ServerState,
    stop: asyncio.Event,
    rack: LiveRack,
    grace_s: float,
) -> asyncio.Task[None]:
    async def drain() -> None:
        await rack.drain(grace_s)

    serving = serve(app, listener, gateway=opening, state=state, stop=stop, grace_s=grace_s, drain=drain)
    running = asyncio.create_task(serving)
    running.add_done_callback(lambda _: stop.set())
    return running


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Seen:
    """What watches a rack at work: metrics, the journal, the watch for stalls, the page and, if asked for, traces."""

    def __init__(self, settings: Settings, closing: contextlib.ExitStack) -> None:
        server = settings.server
        ranks = settings.topology.ranks("prefill") + settings.topology.ranks("decode")
        self.metrics = Metrics(ranks, aliases=server.metrics_aliases)
        self.state = ServerState(loading=True)
        self._watch = StallWatch(server.stuck)
        self.view = RackView(time.monotonic_ns())
        self.curve = read_curve(server.frontier) if server.frontier else None
        journal = Journal()
        self.witnesses: list[Witness] = [journal]
        self.sinks: list[Sink] = [self._follow, self._watch, journal, self.view]
        if server.otlp_endpoint:
            tracer = open_tracer(server.otlp_endpoint, partial(asyncio.get_running_loop().call_later, LINGER_S))
            closing.callback(tracer.close)
            self.witnesses.append(tracer)
            self.sinks.append(tracer)

    def look_at(self, rack: LiveRack) -> ServerState:
        """From now on the state and the metrics tell of `rack`, whose events come here."""
        self._rack = rack
        self.state.detail = lambda: {"ranks": [health_of(status) for status in rack.status()]}
        self.state.stall = lambda: self._watch.look(rack.status(), time.monotonic_ns())
        self.view.look = lambda: (rack.status(), rack.pool)
        self.metrics.holdings.look = lambda: holdings_of(rack.status(), rack.pool)
        self.metrics.step_parts.look = lambda: step_parts_of(rack.status())
        self.metrics.engine_info.look = lambda: engines_of(rack.status())
        return self.state

    def _follow(self, recorded: Recorded) -> None:
        self.metrics.record(recorded.event)
        if isinstance(recorded.event, RankChanged) and recorded.event.state == "failed":
            self.state.ready = self.state.ready and _can_serve(self._rack.status())


def holdings_of(ranks: Sequence[RankStatus], pool: Directory | None) -> tuple[dict[str, Holding], dict[str, int]]:
    """KV blocks by holder, and the pool's counts, for the metrics."""
    holders = {
        str(Rank(rank.worker, place)): Holding(kv.used, kv.cached, kv.total)
        for rank in ranks
        for place, kv in enumerate(rank.kv)
    }
    if pool is None:
        return holders, {}
    total = pool.blocks.total
    holders[str(POOL_RANK)] = Holding(total - pool.blocks.num_free - pool.num_blocks, pool.num_blocks, total)
    return holders, asdict(pool.counters)


def step_parts_of(ranks: Sequence[RankStatus]) -> dict[str, tuple[float, ...]]:
    """Seconds of engine time by rank and part, for the metrics."""
    return {str(Rank(rank.worker, place)): times.seconds for rank in ranks for place, times in enumerate(rank.times)}


def engines_of(ranks: Sequence[RankStatus]) -> dict[str, tuple[str, int]]:
    """What each rank that was ready computes with, for the metrics."""
    told = [rank for rank in ranks if rank.kernels]
    return {str(Rank(rank.worker, place)): (rank.kernels, rank.threads) for rank in told for place in range(len(rank.kv))}


def _add_gateway(settings: Settings, rack: LiveRack, taps: Sequence[Tap]) -> Gateway:
    """The node that clients' answers come back to, with `taps` around it."""
    transport: Transport = rack.transport_for(API)
    for each in taps:
        transport = each.around_transport(transport)
    gateway = Gateway(transport, node=API, wait_s=settings.deadlines.request)
    node: Node = gateway
    for each in taps:
        node = each.around_node(node)
    rack.add_node(API, node)
    return gateway


def _factory_of(settings: Settings, served: Served) -> RequestFactory:
    return RequestFactory(
        served.tokenizer,
        served.namespace,
        max_model_len=served.max_model_len,
        models=served.names,
        template=served.template,
        eos_ids=served.eos_ids,
        vocab_size=served.vocab_size,
        limits=settings.limits,
        parsers=_parsers(settings),
        unsupported=lambda request: unsupported(settings.runner, request),
        check=_ConstraintCheck(served),
    )


def _parsers(settings: Settings) -> ParserChoice:
    """What reads answers: as told, else as models of this kind write. Raises ConfigError naming the flag."""
    kind, server = settings.runner.kind, settings.server
    usual = {"deepseek_v41": ("deepseek_v41", "deepseek_v41"), "llama": ("hermes", "none"), "digest": ("none", "none")}[kind]
    given = (server.tool_call_parser, server.reasoning_parser)
    calls, reasoning = (plain if name == "auto" else name for name, plain in zip(given, usual, strict=True))
    return ParserChoice(calls, reasoning)


class _ConstraintCheck:
    """Refuses constraints that no rank could keep to. Its compiler is made when it is first needed."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._compiler: ConstraintCompiler | None = None

    def __call__(self, constraint: Constraint) -> None:
        tokenizer = self._served.tokenizer
        if not isinstance(tokenizer, Tokenizer):
            raise RequestError("the served model has no tokenizer, so its text cannot be held to a form")
        if self._compiler is None:
            self._compiler = ConstraintCompiler(tokenizer, vocab_size=self._served.vocab_size, eos_ids=self._served.eos_ids)
        self._compiler(constraint)


def _open_events(settings: Settings, closing: contextlib.ExitStack) -> KvAnnouncer | None:
    """What tells other routers of the rack's holdings, if that is wanted."""
    server = settings.server
    if not server.kv_events:
        return None
    publisher = closing.enter_context(contextlib.closing(KvPublisher(server.kv_events, server.kv_replay)))
    return KvAnnouncer(settings.topology.ranks("prefill"), publisher.publish)


def open_keys(settings: Settings) -> KeyRing:
    """The keys of a server, from its settings and the environment. Raises as `keys_at`."""
    security = settings.security
    return keys_at(settings.server.host, security.key_file, os.environ.get(KEY_VARIABLE, ""), keyless=security.keyless)


def _reload(keys: KeyRing, sessions: Sessions) -> None:
    """Take the key file over as it is now, if it can be; keys that are gone end the sessions of browsers, too."""
    try:
        gone = keys.reload()
    except RackserveError as error:
        log.warning("the key file is not taken over: %s", error)
        return
    sessions.end_of(gone)
    log.info("the key file was read again", extra={FIELDS: {"keys": len(keys), "removed": len(gone)}})
    print(f"the key file was read again; keys: {len(keys)}, gone: {len(gone)}", flush=True)  # however little is logged


def _can_serve(ranks: Sequence[RankStatus]) -> bool:
    """Whether each role has a rank that is up or will come (back) up."""
    return {rank.role for rank in ranks if rank.state != "failed"} == {"prefill", "decode"}


def health_of(status: RankStatus) -> dict[str, object]:
    """A rank as /health shows it: ages in seconds, null where there is nothing to measure from."""
    fields: dict[str, object] = msgspec.to_builtins(status)
    for name, age in (("beat_age", status.beat_age), ("step_age", status.step_age)):
        fields[name] = None if age < 0 else round(age, 3)
    return fields
