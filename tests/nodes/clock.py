"""A clock, a transport and a recorder that only take notes, for nodes tried without a host."""

from __future__ import annotations

from rackserve.base.events import Event
from rackserve.base.messages import Message
from rackserve.base.transfer import Transfer
from rackserve.base.units import Time
from rackserve.nodes.ports import Ports


class Notes:
    """All ports of one node at once; `advance` moves time and returns the messages that have become due."""

    def __init__(self) -> None:
        self.time: Time = 0
        self.timers: list[tuple[Time, Message]] = []
        self.sent: list[tuple[str, Message]] = []
        self.events: list[Event] = []
        self.started: list[Transfer] = []
        self.cancelled: list[int] = []

    def now(self) -> Time:
        return self.time

    def call_at(self, when: Time, message: Message) -> None:
        self.timers.append((when, message))

    def send(self, to: str, message: Message) -> None:
        self.sent.append((to, message))

    def record(self, event: Event) -> None:
        self.events.append(event)

    def start(self, transfer: Transfer) -> None:
        self.started.append(transfer)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def advance(self, to: Time) -> list[Message]:
        due = sorted((timer for timer in self.timers if timer[0] <= to), key=lambda timer: timer[0])
        self.timers = [timer for timer in self.timers if timer[0] > to]
        self.time = to
        return [message for _, message in due]

    def ports(self) -> Ports:
        return Ports(self, self, self, store=self)
