"""What deciding costs beside doing: the control path of a decode step, and the placement of a long request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import shake_128
from time import process_time_ns

import msgspec
from measure import CPU_TIME, Claim, Figure, Options, Result, at_most, figure, interleave, main, ns_per_call
from real_step import RealEngine, missing, no_kernels

from rackserve.base.events import Event
from rackserve.base.ids import POOL_RANK, Rank
from rackserve.base.keys import KEY_BYTES, TOKEN_BYTES, CacheNamespace, Chain, extend_chain, prefix
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.messages import (
    AttemptFinished,
    BlocksStored,
    HandOver,
    Message,
    Place,
    Placed,
    RankUp,
    Reserve,
    StepFinished,
)
from rackserve.base.request import Placement, Request
from rackserve.base.step import GroupStep, ItemResult, StepResult
from rackserve.base.transfer import Transfer
from rackserve.base.units import Time
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.decode import DecodeNode
from rackserve.nodes.ports import Ports
from rackserve.nodes.router import Capacity, Router
from rackserve.nodes.worker import Owner, Worker
from rackserve.route.placement import RouterConfig
from rackserve.sched.scheduler import SchedulerConfig

BLOCK = 64
PROMPT_BLOCKS = 2_220
BATCHES = (1, 8, 32)
STEPS = BLOCK
"""Steps a round: every sequence fills, and announces, exactly one block."""
PREFILL_RANKS = DECODE_RANKS = 36
SESSIONS = 400
SHARED_BLOCKS = 200
NATIVE_CONTEXT = 128
STATED_STEP_NS = 20e6
"""A decode step of 20 ms, stated and not measured: 50 tokens per second and user."""
STATED = "a decode step of 20 ms (stated)"


class Wires:
    """All ports of a node at once: keeps what is sent and started, and lets no time pass."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.steps: list[GroupStep] = []

    def now(self) -> Time:
        return 0

    def call_at(self, when: Time, message: Message) -> None:
        """No timer ever rings."""

    def send(self, to: str, message: Message) -> None:
        self.sent.append(message)

    def record(self, event: Event) -> None:
        """Recorders are measured nowhere here."""

    def start(self, work: GroupStep | Transfer) -> None:
        if isinstance(work, GroupStep):
            self.steps.append(work)

    def cancel(self, number: int) -> None:
        """No transfer is started, so none is cancelled."""

    def ports(self) -> Ports:
        return Ports(self, self, self, self, self)


def request_of(name: str, tokens: bytes, chain: Chain, root: bytes, max_tokens: int) -> Request:
    num_tokens = len(tokens) // TOKEN_BYTES
    return Request(name, name, tokens, chain, num_tokens, max_tokens, ignore_eos=True, root=root)


class DecodeBatch:
    """A decode worker with `batch` sequences of some 142 k tokens each, which fill their blocks at different steps."""

    def __init__(self, batch: int, rounds: int, prompt_blocks: int) -> None:
        layout = KvLayout(BLOCK, (KvGroup("kv", "full", 4096),))
        outputs = (rounds + 3) * STEPS
        room = batch * (prompt_blocks + outputs // BLOCK + 2)
        self._wires = Wires()

        def parts(owner: Owner) -> Worker:
            config = SchedulerConfig(max_batched_tokens=512, max_sequences=batch, max_steps_in_flight=2)
            return Worker("decode0", 1, room, 0, layout, config, Deadlines(), self._wires.ports(), owner, 1, True)

        self.node = DecodeNode(parts)
        root = CacheNamespace("m", "0", BLOCK, layout.fingerprint()).root()
        for number in range(batch):
            num_tokens = prompt_blocks * BLOCK + number * BLOCK // batch
            tokens = number.to_bytes(TOKEN_BYTES, "little") * num_tokens
            request = request_of(f"r{number}", tokens, extend_chain(b"", root, tokens, BLOCK), root, outputs)
            placement = Placement(request.id, 1, Rank("prefill0"), Rank("decode0"), 0, 0)
            self.node.handle(Reserve(placement, request))
            self.node.handle(HandOver(request.id, 1, (7,), 0))

    def steps(self) -> tuple[float, float]:
        """Run STEPS steps: (nanoseconds of the node a step, nanoseconds of encoding what it sent a step)."""
        encode = msgspec.msgpack.Encoder().encode
        node_ns = encode_ns = 0
        for _ in range(STEPS):
            step = self._wires.steps.pop(0)
            results = tuple(
                StepResult(part.dp_rank, tuple(ItemResult(item.sequence, (7,)) for item in part.items)) for part in step.steps
            )
            message = StepFinished(step.number, results, 1_000)
            self._wires.sent.clear()
            start = process_time_ns()
            self.node.handle(message)
            middle = process_time_ns()
            for sent in self._wires.sent:
                encode(sent)
            encode_ns += process_time_ns() - middle
            node_ns += middle - start
        return node_ns / STEPS, encode_ns / STEPS


def _decode(batch: int, options: Options, engine: RealEngine | None) -> list[Figure]:
    worker = DecodeBatch(batch, options.rounds, 20 if options.quick else PROMPT_BLOCKS)
    encoding: list[float] = []

    def steps() -> float:
        node_ns, encode_ns = worker.steps()
        encoding.append(encode_ns)
        return node_ns

    variants: dict[str, Callable[[], float]] = {"node": steps}
    if engine is not None:
        variants["real"] = partial(ns_per_call, partial(engine.decode, batch), 1)
    ns = interleave(variants, options.rounds)
    node, encoding = ns["node"], encoding[1:]
    what = f"decode step, batch {batch}"
    figures = [
        figure(f"{what}: plan, apply, emit", "µs", node, "encoding the messages it sends", encoding, 1e-3),
        figure(f"{what}: plan, apply, emit", "µs", node, STATED, STATED_STEP_NS, 1e-3),
    ]
    if engine is not None:
        to = f"a step of the reference engine, batch {batch}, context {engine.context}"
        figures.append(figure(f"{what}: plan, apply, emit", "µs", node, to, ns["real"], 1e-3))
    return figures


class NativeStep:
    """Steps of the embedded model, `batch` sequences at a context of NATIVE_CONTEXT; time in native kernels is told apart."""

    def __init__(self, batch: int) -> None:
        from rackserve.kernels.cpu import library

        self._batch = batch
        self._engine = RealEngine(batch, NATIVE_CONTEXT, kernels="native")
        for number in range(batch):
            self._engine.prefill(number)
        self.kernel_ns = 0
        found = library.find()
        assert found is not None
        for name in ("rk_decoder_forward", "rk_decoder_logits"):
            setattr(found.c, name, partial(self._timed, getattr(found.c, name)))

    def _timed(self, kernel: Callable[..., int], *given: object) -> int:
        start = process_time_ns()
        code = kernel(*given)
        self.kernel_ns += process_time_ns() - start
        return code

    def beside(self, whole: list[float]) -> float:
        """Nanoseconds of Python a step; what the whole step takes goes to `whole`."""
        before, calls = self.kernel_ns, 8
        step = ns_per_call(partial(self._engine.decode, self._batch), calls)
        whole.append(step)
        return step - (self.kernel_ns - before) / calls


def _beside_kernels(options: Options) -> tuple[list[Claim], list[Figure]]:
    """What is Python in a native step, and in all around it, beside that step; one after the other, so that times add up.

    Served, the worker's part goes on while kernels compute; only the first keeps them waiting.
    """
    batch = 2 if options.quick else max(BATCHES)
    native, worker = NativeStep(batch), DecodeBatch(batch, options.rounds, 20)
    whole: list[float] = []
    ns = interleave({"beside": partial(native.beside, whole), "node": lambda: worker.steps()[0]}, options.rounds)
    steps = whole[1:]
    both = [sum(pair) for pair in zip(ns["beside"], ns["node"], strict=True)]
    to = f"a native step, batch {batch}, context {NATIVE_CONTEXT}"
    figures = [
        figure(f"native decode step, batch {batch}: inputs, checks, draws", "µs", ns["beside"], to, steps, 1e-3),
        figure(f"native decode step, batch {batch}: that and plan, apply, emit", "µs", both, to, steps, 1e-3),
    ]
    texts = "what keeps kernels waiting takes", "that and all decisions, were they to keep them waiting too, take"
    claims = [
        at_most(f"batch {batch}: {text} at most 3 % of {to}", part.ratios, 0.03)
        for text, part in zip(texts, figures, strict=True)
    ]
    return claims, figures


class PlacementBench:
    """A router that knows SESSIONS sessions, each held by one to three prefill ranks and the pool, places their next turns."""

    def __init__(self, options: Options) -> None:
        blocks = 40 if options.quick else PROMPT_BLOCKS
        shared = min(SHARED_BLOCKS, blocks // 2)
        sessions = 20 if options.quick else SESSIONS
        self._wires = Wires()
        capacity = Capacity(10**7, 10**9, BLOCK, fetch_cost=0.02)
        self.router = Router(RouterConfig(), capacity, Deadlines(), self._wires.ports())
        for number in range(PREFILL_RANKS):
            self.router.handle(RankUp(Rank(f"prefill{number}"), "prefill", 1))
        for number in range(DECODE_RANKS):
            self.router.handle(RankUp(Rank(f"decode{number}"), "decode", 1))
        system = shake_128(b"system").digest(shared * KEY_BYTES)
        self._numbers: dict[Rank, int] = {}
        self._chains: list[Chain] = []
        for number in range(sessions):
            chain = system + shake_128(f"{options.seed}/{number}".encode()).digest((blocks - shared) * KEY_BYTES)
            self._chains.append(chain)
            holders = [Rank(f"prefill{(number * 7 + other * 11) % PREFILL_RANKS}") for other in range(1 + number % 3)]
            for part, holder in enumerate([*holders, POOL_RANK]):
                self._announce(holder, prefix(chain, blocks - 40 * part if blocks > 200 else blocks))
        self.tokens = bytes(blocks * BLOCK * TOKEN_BYTES)
        self._count = 0

    def _announce(self, holder: Rank, chain: Chain) -> None:
        self._numbers[holder] = self._numbers.get(holder, 0) + 1
        self.router.handle(BlocksStored(holder, self._numbers[holder], chain, 0))

    def next_place(self) -> Place:
        self._count += 1
        chain = self._chains[self._count * 13 % len(self._chains)]
        return Place(request_of(f"r{self._count}", self.tokens, chain, b"", 100))

    def place(self, calls: int) -> float:
        """Nanoseconds a placement takes; up to 64 attempts are open, and their end is not measured."""
        places = [self.next_place() for _ in range(calls)]
        open_at: list[Placement] = []
        total = 0
        for place in places:
            self._wires.sent.clear()
            start = process_time_ns()
            self.router.handle(place)
            total += process_time_ns() - start
            open_at += [message.placement for message in self._wires.sent if isinstance(message, Placed)]
            if len(open_at) > 64:
                self._close(open_at.pop(0))
        for placement in open_at:
            self._close(placement)
        return total / calls

    def _close(self, placement: Placement) -> None:
        self.router.handle(AttemptFinished(*placement.key, placement.decode))


def _placement(options: Options) -> list[Figure]:
    bench = PlacementBench(options)
    calls = 10 if options.quick else 200
    message = bench.next_place()
    variants: dict[str, Callable[[], float]] = {
        "place": partial(bench.place, calls),
        "memcpy": partial(ns_per_call, lambda: bytearray(bench.tokens), calls),
        "encode": partial(ns_per_call, partial(msgspec.msgpack.Encoder().encode, message), calls),
    }
    ns = interleave(variants, options.rounds)
    what = f"placement of {len(bench.tokens) // TOKEN_BYTES:,} tokens on {PREFILL_RANKS} ranks"
    copying = f"copying the prompt's {len(bench.tokens) / 1e3:,.0f} kB of token ids"
    return [
        figure(what, "µs", ns["place"], copying, ns["memcpy"], 1e-3),
        figure(what, "µs", ns["place"], "encoding its message", ns["encode"], 1e-3),
        figure(what, "µs", ns["place"], STATED, STATED_STEP_NS, 1e-3),
    ]


def run(options: Options) -> Result:
    engine = None
    notes = [
        f"Contexts of {PROMPT_BLOCKS:,} blocks of {BLOCK} tokens; in each round of {STEPS} steps every sequence fills and "
        "announces one block. Recorders and sockets are left out. The decisions of a worker run on one Python thread, next to "
        "its engine's; with two steps in flight they overlap with a step.",
    ]
    lacking = "this is a quick run" if options.quick else missing()
    if not lacking:
        engine = RealEngine(max(BATCHES), context=128)
        for number in range(max(BATCHES)):
            engine.prefill(number)
    else:
        notes.append(f"No ratio to a real step: {lacking}.")
    steps = [_decode(batch, options, engine) for batch in BATCHES]
    placement = _placement(options)
    claims = [
        at_most(f"batch {batch}: deciding takes at most 2 % of {STATED}", figures[1].ratios, 0.02)
        for batch, figures in zip(BATCHES, steps, strict=True)
    ]
    claims += [
        at_most("placing a request takes no longer than copying its token ids", placement[0].ratios, 1),
        at_most(f"placing a request takes at most 2 % of {STATED}", placement[2].ratios, 0.02),
    ]
    native: list[Figure] = []
    lacking = lacking or no_kernels()
    if not lacking:
        more, native = _beside_kernels(options)
        claims += more
    question = "What does deciding cost beside doing, per decode step and per placement, at contexts of 142 k tokens?"
    every = [part for figures in steps for part in figures] + native + placement
    return Result("control_plane", question, CPU_TIME, tuple(claims), tuple(every), tuple(notes))


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
