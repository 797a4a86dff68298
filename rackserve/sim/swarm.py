"""The swarm: a small rack, load, policy and faults drawn from a seed, run with every law on.

`python -m rackserve swarm --seeds N` runs seeds 0..N-1; a failure names its seed, and `--seed K` runs it again alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rackserve.assemble import RackConfig
from rackserve.base.errors import InvariantError
from rackserve.base.ids import FRONTEND
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import Cancel, Message, Output, Submit, Timeout
from rackserve.base.request import Request, SamplingParams
from rackserve.base.rng import Stream
from rackserve.base.step import Step
from rackserve.base.topology import Topology
from rackserve.base.units import NS_PER_MS, NS_PER_S, NS_PER_US, Time
from rackserve.digest_model import DigestRunner, cold_output, digest_layout
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.frontend import FrontendConfig
from rackserve.nodes.ports import Ports
from rackserve.pool.directory import PoolConfig
from rackserve.route.placement import POLICIES, RouterConfig
from rackserve.runs.accounts import TenantsConfig
from rackserve.sched.queue import ORDERS
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.checks import check_always, check_at_rest, watch
from rackserve.sim.faults import FaultPlan, inject
from rackserve.sim.rack import SimRack
from rackserve.sim.store import LinkCost

CLIENT = "client"
VOCAB = 32

PATIENT = Deadlines(
    request=600, unavailable=60, retry=0.05, silence=20, reorder=0.003, booking=15, queue=8, lookup=0.05, transfer=0.9,
    handover=3, receive=10, fence=0.1,
)  # fmt: skip
HASTY = msgspec.structs.replace(PATIENT, queue=0.2, lookup=0.001, transfer=0.02, handover=0.02, receive=0.03, fence=0.002)
"""So short that ranks often give up on each other while the other side is still at it."""


@dataclass(slots=True)
class SwarmRun:
    """One drawn case, ready to run."""

    seed: int
    config: RackConfig
    layout: KvLayout
    plan: FaultPlan
    num_sessions: int
    num_turns: int
    cancels: float
    max_prompt: int
    num_tenants: int = 1


@dataclass(frozen=True, slots=True)
class SwarmResult:
    """What happened: requests by outcome, retries, events handled, and the log's digest."""

    seed: int
    finished: int
    failed: int
    cancelled: int
    retried: int
    cached_tokens: int
    prompt_tokens: int
    num_events: int
    digest: str


@dataclass(slots=True)
class _Call:
    request: Request
    output: list[int] = field(default_factory=list)
    ends: int = 0
    outcome: str = ""


class SwarmClient:
    """Growing sessions: each turn re-sends all before it, adds new tokens, and is sometimes cancelled half-way."""

    def __init__(self, run: SwarmRun, ports: Ports) -> None:
        self._run = run
        self._ports = ports
        self._chance = Stream("client", run.seed)
        layout = run.layout
        self._roots = [
            CacheNamespace("digest", "0", layout.block_tokens, layout.fingerprint(), _tenant(number)).root()
            for number in range(run.num_tenants)
        ]
        self._history: dict[str, list[int]] = {}
        self._turns: dict[str, int] = {}
        self.calls: dict[str, _Call] = {}
        self.retried = self.cached = self.prompted = 0

    def start(self) -> None:
        """Begin every session at a drawn moment."""
        run = self._run
        shared = [self._chance.below(VOCAB) for _ in range(self._chance.below(3 * run.layout.block_tokens))]
        for number in range(run.num_sessions):
            session = f"s{number}"
            self._history[session] = list(shared) if self._chance.chance(0.7) else []
            self._turns[session] = 0
            when = self._chance.below(300 * NS_PER_MS)
            self._ports.clock.call_at(when, Timeout("turn", session))

    def handle(self, message: Message) -> None:
        if isinstance(message, Timeout):
            if message.kind == "turn":
                self._send(message.key)
            elif message.kind == "cancel":
                self._ports.transport.send(FRONTEND, Cancel(message.key))
        elif isinstance(message, Output):
            self._on_output(message)

    def _send(self, session: str) -> None:
        run, chance = self._run, self._chance
        history = self._history[session]
        room = run.max_prompt - len(history)
        if room < 1:
            return
        history += [chance.below(VOCAB) for _ in range(chance.between(1, min(room, 3 * run.layout.block_tokens)))]
        tokens = array("i", history).tobytes()
        turn = self._turns[session] = self._turns[session] + 1
        tenant = int(session[1:]) % run.num_tenants
        root = self._roots[tenant]
        request = Request(
            id=f"{session}/{turn}",
            session=session,
            tokens=tokens,
            chain=extend_chain(b"", root, tokens, run.layout.block_tokens),
            num_tokens=len(history),
            max_tokens=chance.between(1, 12),
            sampling=SamplingParams(
                temperature=float(chance.below(2)),
                seed=chance.below(100),
                presence_penalty=float(turn % 3 == 1),  # the toy model's choice then depends on all output,
                repetition_penalty=2.0 if turn % 3 == 2 else 1.0,  # or on the prompt too
                min_tokens=turn % 4,
            ),
            stop_token_ids=(0,),
            root=root,
            tenant=_tenant(tenant),
        )
        self.calls[request.id] = _Call(request)
        self._ports.transport.send(FRONTEND, Submit(request, CLIENT))
        if chance.chance(run.cancels):
            when = self._ports.clock.now() + chance.below(40 * NS_PER_MS)
            self._ports.clock.call_at(when, Timeout("cancel", request.id))

    def _on_output(self, message: Output) -> None:
        call = self.calls[message.request]
        if call.ends:
            raise InvariantError(f"{message.request} had output after its end (I1)")
        if message.index != len(call.output):
            raise InvariantError(f"{message.request}: output {message.index} came after {len(call.output)} tokens")
        call.output.extend(message.tokens)
        self._compare(call)
        if message.finish is None and message.error is None:
            return
        call.ends += 1
        call.outcome = message.error or message.finish or ""
        self.retried += message.attempts - 1
        if message.finish in ("stop", "length") and message.usage is not None:
            if len(call.output) != message.usage.output_tokens or call.request.num_tokens != message.usage.prompt_tokens:
                raise InvariantError(f"{message.request}: usage {message.usage} does not add up (I12)")
            expected = self._cold(call)
            if call.output != expected:
                raise InvariantError(f"{message.request}: output {call.output}, a cold server gives {expected} (I13)")
            self.cached += message.usage.cached_tokens
            self.prompted += message.usage.prompt_tokens
        session = call.request.session
        if self._turns[session] < self._run.num_turns:
            if message.finish is not None:
                self._history[session] += call.output
            when = self._ports.clock.now() + self._chance.below(50 * NS_PER_MS)
            self._ports.clock.call_at(when, Timeout("turn", session))

    def _cold(self, call: _Call) -> list[int]:
        request, layout = call.request, self._run.layout
        return cold_output(
            request.tokens,
            request.max_tokens,
            window=layout.has_window,
            history=layout.history_tokens,
            replay=layout.replay_tokens,
            tail=layout.tail_tokens > 0,
            vocab_size=VOCAB,
            stop=request.stop_token_ids,
            sampling=request.sampling,
        )

    def _compare(self, call: _Call) -> None:
        if len(call.output) > call.request.max_tokens:
            raise InvariantError(f"{call.request.id}: {len(call.output)} tokens of {call.request.max_tokens}")

    def check(self) -> None:
        """Every request ended exactly once (I1)."""
        for name, call in self.calls.items():
            if call.ends != 1:
                raise InvariantError(f"{name} ended {call.ends} times (I1)")


def draw(seed: int) -> SwarmRun:
    """The case of `seed`: everything about it is a function of that number."""
    chance, modes, sharing = Stream("swarm", seed), Stream("resume", seed), Stream("tenants", seed)
    block_tokens = (2, 4, 8)[chance.below(3)]
    window = chance.chance(0.3)
    pool = chance.chance(0.7)
    num_draft = 3 if (modes.chance(0.5) if window else chance.chance(0.2)) else 0
    blocks = chance.between(12, 40)
    topology = Topology(
        prefill_workers=chance.between(1, 3),
        decode_workers=chance.between(1, 2),
        prefill_ranks=chance.between(1, 2),
        decode_ranks=chance.between(1, 2),
        prefill_blocks=blocks,
        decode_blocks=blocks,
        pool=pool,
        segment_blocks=chance.between(2, 60) if pool else 0,
        rank_windows=modes.between(3, 24) if window else 0,
        segment_windows=chance.between(1, 8) if window else 0,
    )
    scheduler = SchedulerConfig(
        max_batched_tokens=chance.between(4, 32),
        max_sequences=chance.between(1, 6),
        max_steps_in_flight=1 if num_draft else chance.between(1, 2),
        num_draft=num_draft,
        order=sorted(ORDERS)[chance.below(len(ORDERS))],
        max_skips=chance.below(5),
    )
    config = RackConfig(
        topology=topology,
        frontend=FrontendConfig(max_attempts=40),
        router=RouterConfig(policy=sorted(POLICIES)[chance.below(len(POLICIES))]),
        scheduler=scheduler,
        pool=PoolConfig(lease_ns=2 * NS_PER_S),
        deadlines=HASTY if chance.chance(0.2) else PATIENT,
        tenants=TenantsConfig((0.0, 0.5, 1.0)[sharing.below(3)], (0.0, 1.0, 8.0)[sharing.below(3)]),
    )
    return SwarmRun(
        seed,
        config,
        _draw_layout(modes, block_tokens, window=window),
        _draw_faults(chance),
        num_sessions=chance.between(1, 8),
        num_turns=chance.between(1, 5),
        cancels=(0.0, 0.2, 0.7)[chance.below(3)],
        max_prompt=blocks * block_tokens - 14,
        num_tenants=sharing.between(1, 3),
    )


def _tenant(number: int) -> str:
    return f"tenant{number}" if number else ""


def _draw_layout(chance: Stream, block_tokens: int, *, window: bool) -> KvLayout:
    """A model with or without a resume state, stored or computed again, that looks back at some of its own ids."""
    replay = (0, 0, 0, 2, 5, 9)[chance.below(6)] if window else 0
    tail = replay > 0 and chance.chance(0.5)
    return digest_layout(block_tokens, window=window, history=chance.below(4), replay=replay, tail=tail)


def _draw_faults(chance: Stream) -> FaultPlan:
    """A quarter of all cases are without faults; the others have a few kinds each."""
    if chance.chance(0.25):
        return FaultPlan()
    return FaultPlan(
        loss=0.02 if chance.chance(0.3) else 0.0,
        double=0.05 if chance.chance(0.3) else 0.0,
        late=0.2 if chance.chance(0.4) else 0.0,
        kills=chance.below(4) if chance.chance(0.4) else 0,
        segment_losses=chance.below(3),
        slow_ranks=chance.below(3),
        engine_failures=chance.below(3) if chance.chance(0.3) else 0,
        slow_transfers=chance.below(3),
    )


def step_time(step: Step) -> Time:
    """A step of the swarm's imaginary engine."""
    return 200 * NS_PER_US + step.num_tokens * 100 * NS_PER_US


def build(run: SwarmRun) -> tuple[SimRack, SwarmClient]:
    """The rack and client of a drawn case, faults armed."""
    rack = SimRack(
        run.config,
        run.layout,
        lambda arena, num_blocks: DigestRunner(arena, num_blocks, run.layout, VOCAB),
        {"prefill": step_time, "decode": step_time},
        LinkCost(latency_ns=100 * NS_PER_US, bytes_per_s=1e6),
        backed=True,
    )
    clients: list[SwarmClient] = []

    def make(ports: Ports) -> SwarmClient:
        clients.append(SwarmClient(run, ports))
        return clients[0]

    rack.add_node(CLIENT, make)
    clients[0].start()
    return rack, clients[0]


def run_seed(seed: int, *, checked: bool = True, mutate: Callable[[SimRack], None] | None = None) -> SwarmResult:
    """Run the case of `seed` to rest. Raises InvariantError, its text beginning with the seed, if a law is broken."""
    run = draw(seed)
    try:
        rack, client = build(run)
        if mutate is not None:
            mutate(rack)
        inject(rack, run.plan, seed)
        if checked:
            watch(rack)
            rack.host.after_event = lambda: check_always(rack)
        rack.host.run(max_events=400_000)
        if not rack.host.is_idle:
            raise InvariantError("the rack does not come to rest")
        client.check()
        check_at_rest(rack)
    except InvariantError as error:
        raise InvariantError(f"swarm seed {seed}: {error}\n  reproduce: rackserve swarm --seed {seed}") from error
    outcomes = [call.outcome for call in client.calls.values()]
    finished = sum(outcome in ("stop", "length") for outcome in outcomes)
    cancelled = outcomes.count("cancelled")
    return SwarmResult(
        seed,
        finished,
        len(outcomes) - finished - cancelled,
        cancelled,
        client.retried,
        client.cached,
        client.prompted,
        rack.host.num_events,
        rack.host.digest(),
    )


def describe(run: SwarmRun) -> str:
    """The drawn case as readable text."""
    return msgspec.json.format(msgspec.json.encode(run.config)).decode() + f"\nfaults: {run.plan}"
