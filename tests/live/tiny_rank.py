"""A rank process with a node that does what the text of a `Cancel` message says, and reports what it hears to `api`."""

from __future__ import annotations

import os
import signal

from rackserve.base.messages import Cancel, Message, RankDown, RankUp
from rackserve.base.step import GroupStep, Step, StepResult
from rackserve.base.transfer import Copy, Transfer, arena_region
from rackserve.digest_model import DigestRunner
from rackserve.live.engine_main import main
from rackserve.live.rank_spec import RankSpec
from rackserve.nodes.ports import Ports


class TinyNode:
    def __init__(self, spec: RankSpec, ports: Ports) -> None:
        self._name = spec.worker
        self._incarnation = spec.incarnation
        self._ports = ports

    def handle(self, message: Message) -> None:
        if isinstance(message, RankUp | RankDown):
            self._say(f"{type(message).__name__} {message.rank.worker} {message.incarnation}")
            if isinstance(message, RankUp):
                self._peer = arena_region(message.rank, message.incarnation)
        elif not isinstance(message, Cancel):
            self._say(type(message).__name__)
        elif message.request == "crash":
            raise RuntimeError("told to crash")
        elif message.request == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif message.request == "goodbye":
            for number in range(500):
                self._say(str(number))
            os.kill(os.getpid(), signal.SIGTERM)
        elif message.request == "compute":
            assert self._ports.engine is not None
            self._ports.engine.start(GroupStep(1, (Step(0, ()),)))
            self._say("computing")
        elif message.request == "push":
            assert self._ports.store is not None
            own = f"arena/{self._name}.0#{self._incarnation}"
            self._ports.store.start(Transfer(1, "push", (Copy(own, self._peer, "full", (0,), (1,)),)))
        elif message.request.startswith("pass "):
            _, to, text = message.request.split(" ", 2)
            self._ports.transport.send(to, Cancel(text))
        else:
            self._say(message.request)

    def _say(self, text: str) -> None:
        self._ports.transport.send("api", Cancel(f"{self._name}: {text}"))


def compute_for_ever(runner: DigestRunner, step: Step) -> StepResult:
    """A step that never ends and never lets go of the interpreter by itself."""
    while True:
        pass


if __name__ == "__main__":
    DigestRunner.run = compute_for_ever  # type: ignore[method-assign]
    main(TinyNode)
