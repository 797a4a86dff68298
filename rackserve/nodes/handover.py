"""How a prompt's KV goes from a prefill rank to a decode rank: pushed as it is computed, handed over when all has arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rackserve.base.ids import Attempt
from rackserve.base.messages import HandOver, PushesEnded, Reserved
from rackserve.base.transfer import Copy
from rackserve.base.units import Time, blocks_for
from rackserve.nodes.worker import Worker
from rackserve.sched.sequence import Sequence


@dataclass(slots=True)
class Errand:
    """What a prefill rank does for one attempt besides computing: fetch before, push after.

    local, fetched  prompt tokens found in the rank's cache, and fetched from the pool
    pool_lease      lease of the fetch under way, 0 if none
    pushed          the next logical block to push
    """

    arrived: Time
    local: int = 0
    fetched: int = 0
    pool_lease: int = 0
    reserve_sent: bool = False
    reserved: Reserved | None = None
    pushed: int = 0
    window_pushed: bool = False
    first_tokens: tuple[int, ...] = ()


class Pusher:
    """Pushes the blocks of a prefill worker's sequences. `give_up(sequence, reason)` is called when a push fails."""

    def __init__(self, worker: Worker, errands: dict[Attempt, Errand], give_up: Callable[[Sequence, str], None]) -> None:
        self._worker = worker
        self._errands = errands
        self._give_up = give_up

    def on_reserved(self, message: Reserved) -> None:
        sequence, errand = self._worker.sequences.get(message.key), self._errands.get(message.key)
        if sequence is None or errand is None:
            self._worker.drop(message, "attempt is over")
            ended = PushesEnded(message.request, message.attempt)  # or the blocks would stay reserved until a deadline
            self._worker.ports.transport.send(message.rank.worker, ended)
            return
        if sequence.ended or errand.reserved is not None:
            self._worker.drop(message, "not waiting for it")
            return
        errand.reserved = message
        errand.pushed = message.first_block
        self.push(sequence, errand)

    def push(self, sequence: Sequence, errand: Errand) -> None:
        """Push what is computed and not pushed yet; after the last push, hand over."""
        worker, reserved = self._worker, errand.reserved
        if reserved is None or sequence.ended:
            return
        block_tokens = worker.layout.block_tokens
        complete = sequence.state == "pushing"
        total = blocks_for(sequence.request.num_tokens, block_tokens)
        upto = total if complete else sequence.num_present // block_tokens
        region = worker.region(sequence.dp_rank)
        copies = []
        if upto > errand.pushed:
            targets = reserved.slots[errand.pushed - reserved.first_block : upto - reserved.first_block]
            sources = tuple(sequence.block_table[errand.pushed : upto])
            copies.append(Copy(region, reserved.region, "full", sources, targets))
            errand.pushed = upto
        if complete and reserved.window_slot >= 0 and not errand.window_pushed:
            at_boundary = worker.layout.stores_state and sequence.request.num_tokens % block_tokens == 0
            state = sequence.boundary_slot if at_boundary else sequence.end_slot
            copies.append(Copy(region, reserved.region, "window", (state,), (reserved.window_slot,)))
            errand.window_pushed = True
        if copies:
            worker.moves.start("push", sequence, copies, lambda finished: self._pushed(sequence, errand, finished))
        elif complete and not worker.moves.count(sequence, "push"):
            self._hand_over(sequence, errand)

    def _pushed(self, sequence: Sequence, errand: Errand, finished: bool) -> None:
        if sequence.ended:
            self.report_ended(sequence, errand)
        elif not finished:
            self._give_up(sequence, "push failed")
        else:
            self.push(sequence, errand)

    def _hand_over(self, sequence: Sequence, errand: Errand) -> None:
        request = sequence.request
        cached = errand.local + errand.fetched
        message = HandOver(request.id, request.attempt, errand.first_tokens, cached)
        self._worker.ports.transport.send(sequence.placement.decode.worker, message)
        self._errands.pop(sequence.key, None)
        self._worker.end(sequence, "done")

    def report_ended(self, sequence: Sequence, errand: Errand) -> None:
        """Tell the decode rank that its blocks are safe, as soon as no push of this attempt is under way."""
        if self._worker.moves.count(sequence, "push"):
            return
        self._errands.pop(sequence.key, None)
        if errand.reserve_sent:
            request = sequence.request
            self._worker.ports.transport.send(sequence.placement.decode.worker, PushesEnded(request.id, request.attempt))
