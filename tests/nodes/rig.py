"""A small rack on the simulated host over the digest model, with every law checked after every event.

A trial submits requests, bends messages on their way, and looks at answers, events and what is left. Every finished answer is
compared with a cold single server's when the rack has come to rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rackserve.assemble import RackConfig
from rackserve.base.events import Event
from rackserve.base.ids import FRONTEND, NodeId
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.base.messages import Cancel, Message, Output, Submit, Timeout
from rackserve.base.request import Request, SamplingParams, Usage
from rackserve.base.step import Step
from rackserve.base.topology import Topology
from rackserve.base.units import NS_PER_MS, NS_PER_S, NS_PER_US, Time
from rackserve.digest_model import DigestRunner, cold_output, digest_layout
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.decode import DecodeNode
from rackserve.nodes.frontend import FrontendConfig
from rackserve.nodes.ports import Ports
from rackserve.nodes.prefill import PrefillNode
from rackserve.pool.directory import PoolConfig
from rackserve.route.placement import RouterConfig
from rackserve.runs.accounts import TenantsConfig
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.checks import check_always, check_at_rest, watch
from rackserve.sim.rack import SimRack
from rackserve.sim.store import LinkCost

CLIENT = "client"
VOCAB = 64
BLOCK = 4
MS = NS_PER_MS
E = TypeVar("E", bound=Event)
M = TypeVar("M", bound=Message)

SHORT = Deadlines(
    request=600, unavailable=60, retry=0.05, silence=20, booking=15, queue=8, lookup=0.05, transfer=0.9, handover=3, receive=10,
    fence=0.1,
)  # fmt: skip
"""Deadlines short enough to be waited for in a trial."""

Rule = Callable[[NodeId, NodeId, Message], "list[Time] | None"]
"""(source, target, message) -> extra delay of each copy, or None to leave the message to the next rule."""


@dataclass(slots=True)
class Answer:
    """What the client got for one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    usage: Usage | None = None
    attempts: int = 0
    ends: int = 0
    sent: Time = 0
    first: Time = -1
    ended: Time = -1


class Client:
    """Sends requests at their time and keeps what comes back."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports
        self.answers: dict[str, Answer] = {}
        self.other: list[Message] = []

    def handle(self, message: Message) -> None:
        if isinstance(message, Timeout):
            if message.kind == "submit":
                answer = self.answers[message.key]
                answer.sent = self.ports.clock.now()
                self.ports.transport.send(FRONTEND, Submit(answer.request, CLIENT))
            else:
                self.ports.transport.send(FRONTEND, Cancel(message.key))
        elif isinstance(message, Output):
            self._on_output(message)
        else:
            self.other.append(message)

    def _on_output(self, message: Output) -> None:
        answer = self.answers[message.request]
        assert not answer.ends, f"{message.request} had output after its end"
        assert message.index == len(answer.tokens), f"{message.request} has a gap in its output"
        answer.tokens.extend(message.tokens)
        answer.attempts = message.attempts
        if message.tokens and answer.first < 0:
            answer.first = self.ports.clock.now()
        if message.finish is not None or message.error is not None:
            answer.ends += 1
            answer.finish, answer.error, answer.usage = message.finish, message.error, message.usage
            answer.ended = self.ports.clock.now()


MODELS: tuple[dict[str, Any], ...] = (
    {}, {"history": 1}, {"window": True}, {"window": True, "history": 2}, {"replay": 5, "history": 2},
    {"replay": 6, "tail": True, "history": 3},
)  # fmt: skip
"""Digest models of every kind of resume: KV alone, a state that is stored, one that is computed again."""


class Rig:
    """See the module. Steps take 1 ms plus 0.1 ms per token, messages 0.05 ms, transfers 0.1 ms plus 1 MB/s.

    model   options of `digest_layout` beside `window`
    """

    def __init__(
        self,
        *,
        block: int = BLOCK,
        window: bool = False,
        model: dict[str, Any] | None = None,
        topology: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        tenants: TenantsConfig | None = None,
        deadlines: Deadlines = SHORT,
        max_attempts: int = 5,
        max_requests: int = 1000,
        lease_s: int = 2,
        link: LinkCost | None = None,
        step_time: Callable[[Step], Time] | None = None,
    ) -> None:
        self.model = {"window": window} | (model or {})
        self.layout = digest_layout(block, **self.model)
        slots = 24 if self.layout.has_window else 0
        shape: dict[str, Any] = {
            "prefill_workers": 1,
            "decode_workers": 1,
            "prefill_blocks": 64,
            "decode_blocks": 64,
            "pool": False,
            "segment_blocks": 256,
            "rank_windows": slots,
            "segment_windows": slots,
        } | (topology or {})
        self.block = block
        self.namespace = CacheNamespace("digest", "0", block, self.layout.fingerprint())
        config = RackConfig(
            topology=Topology(**shape),
            frontend=FrontendConfig(max_attempts=max_attempts, max_requests=max_requests),
            router=RouterConfig(**(router or {})),
            scheduler=SchedulerConfig(**({"max_batched_tokens": 16, "max_sequences": 8} | (scheduler or {}))),
            pool=PoolConfig(lease_ns=lease_s * NS_PER_S),
            deadlines=deadlines,
            tenants=tenants or TenantsConfig(),
        )
        timed = step_time or (lambda step: MS + step.num_tokens * 100 * NS_PER_US)
        self.rack = SimRack(
            config,
            self.layout,
            lambda arena, num_blocks: DigestRunner(arena, num_blocks, self.layout, VOCAB),
            {"prefill": timed, "decode": timed},
            link or LinkCost(latency_ns=100 * NS_PER_US, bytes_per_s=1e6),
            backed=True,
        )
        self.host = self.rack.host
        self.events: list[tuple[Time, NodeId, Event]] = []
        self.sent: list[tuple[Time, NodeId, NodeId, Message]] = []
        self.rules: list[Rule] = []
        self.host.sinks.append(lambda now, node, event: self.events.append((now, node, event)))
        self.host.filter = self._bend
        watch(self.rack)
        self.host.after_event = lambda: check_always(self.rack)
        clients: list[Client] = []

        def make(ports: Ports) -> Client:
            clients.append(Client(ports))
            return clients[0]

        self.rack.add_node(CLIENT, make)
        self.client = clients[0]

    def _bend(self, source: NodeId, target: NodeId, message: Message) -> list[Time]:
        self.sent.append((self.host.now, source, target, message))
        for rule in self.rules:
            delays = rule(source, target, message)
            if delays is not None:
                return delays
        return [0]

    # ------------------------------------------------------------ what a trial does

    def submit(
        self,
        name: str,
        tokens: Iterable[int],
        max_tokens: int = 6,
        *,
        at: Time | None = None,
        session: str = "",
        seed: int | None = None,
        stop: tuple[int, ...] = (),
        sampling: SamplingParams | None = None,
        prompt_logprobs: int = -1,
        tenant: str = "",
    ) -> Answer:
        """Send a request at `at` (default: now)."""
        ids = array("i", list(tokens))
        raw = ids.tobytes()
        if sampling is None:
            sampling = SamplingParams() if seed is None else SamplingParams(temperature=1.0, seed=seed)
        root = msgspec.structs.replace(self.namespace, tenant_salt=tenant).root()
        chain = extend_chain(b"", root, raw, self.block)
        request = Request(
            id=name, session=session or name, tokens=raw, chain=chain, num_tokens=len(ids), max_tokens=max_tokens,
            sampling=sampling, stop_token_ids=stop, root=root, prompt_logprobs=prompt_logprobs, tenant=tenant,
        )  # fmt: skip
        answer = self.client.answers[name] = Answer(request)
        self.client.ports.clock.call_at(self.host.now if at is None else at, Timeout("submit", name))
        return answer

    def cancel(self, name: str, at: Time | None = None) -> None:
        self.client.ports.clock.call_at(self.host.now if at is None else at, Timeout("cancel", name))

    def lose(self, kind: type[Message], times: int = 1, when: Callable[[Any], bool] = lambda message: True) -> None:
        """Lose the next `times` messages of a kind."""
        left = [times]

        def rule(source: NodeId, target: NodeId, message: Message) -> list[Time] | None:
            if isinstance(message, kind) and left[0] and when(message):
                left[0] -= 1
                return []
            return None

        self.rules.append(rule)

    def on_message(
        self,
        kind: type[Message],
        action: Callable[[], None],
        times: int = 1,
        when: Callable[[Any], bool] = lambda message: True,
    ) -> None:
        """Do something at the moment a message of a kind is sent (before it arrives)."""
        left = [times]

        def rule(source: NodeId, target: NodeId, message: Message) -> list[Time] | None:
            if isinstance(message, kind) and left[0] and when(message):
                left[0] -= 1
                self.host.call(self.host.now, action)
            return None

        self.rules.append(rule)

    def run(self, for_ns: Time | None = None) -> None:
        """Run to rest, or for a time. Timers may be the only thing left: they are run out too."""
        until = None if for_ns is None else self.host.now + for_ns
        self.host.run(until=until, max_events=200_000)
        assert for_ns is not None or self.host.is_idle, "the rack does not come to rest"

    def rest(self) -> None:
        """Run to rest; then nothing is held, the index tells the truth, and every finished answer equals a cold server's."""
        self.run()
        check_at_rest(self.rack)
        for name, answer in self.client.answers.items():
            assert answer.ends == 1, f"{name} ended {answer.ends} times"
            if answer.finish in ("stop", "length"):
                assert answer.tokens == self.cold(answer), f"{name} differs from a cold server"

    # ------------------------------------------------------------ what a trial looks at

    def cold(self, answer: Answer) -> list[int]:
        request = answer.request
        return cold_output(
            request.tokens, request.max_tokens, vocab_size=VOCAB, stop=request.stop_token_ids, sampling=request.sampling,
            **self.model,
        )  # fmt: skip

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for _, _, event in self.events if isinstance(event, kind)]

    def messages_of(self, kind: type[M]) -> list[M]:
        return [message for _, _, _, message in self.sent if isinstance(message, kind)]

    def prefill(self, number: int = 0) -> PrefillNode:
        node = self.rack.workers()[f"prefill{number}"]
        assert isinstance(node, PrefillNode)
        return node

    def decode(self, number: int = 0) -> DecodeNode:
        node = self.rack.workers()[f"decode{number}"]
        assert isinstance(node, DecodeNode)
        return node


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    """A prompt whose first token tells it from those of other salts."""
    return [salt % VOCAB, *((7 * index + 3 * salt + index * index) % VOCAB for index in range(1, num_tokens))]
