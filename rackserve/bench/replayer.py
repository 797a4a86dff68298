"""The client as a node: drives a plan on any host through the same ports as every other node."""

from __future__ import annotations

from rackserve.base.ids import FRONTEND, NodeId
from rackserve.base.messages import Cancel, Message, Output, Submit, Timeout
from rackserve.base.units import Time
from rackserve.bench.ideal import IdealCache
from rackserve.bench.plan import Plan, RequestKey
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import OpenRecord, RequestRecord
from rackserve.ports import Clock, Transport


class Replayer:
    """Sends `Submit` to the frontend when the plan says so and keeps a record of each request."""

    def __init__(
        self,
        name: NodeId,
        plan: Plan,
        maker: RequestMaker,
        ideal: IdealCache,
        clock: Clock,
        transport: Transport,
    ) -> None:
        self._name = name
        self._plan = plan
        self._maker = maker
        self._ideal = ideal
        self._clock = clock
        self._transport = transport
        self._open: dict[str, tuple[RequestKey, OpenRecord]] = {}
        self._wake: Time | None = None
        self.num_outputs = 0
        self.records: list[RequestRecord] = []

    @property
    def done(self) -> bool:
        """Every request of the plan has ended."""
        return self._plan.done

    @property
    def num_open(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._open)

    def start(self) -> None:
        """Begin the replay at the host's present time."""
        self._plan.start(self._clock.now())
        self._send_due()

    def stop(self) -> None:
        """End the run now: send nothing more, cancel what is in flight and record it as unfinished."""
        now = self._clock.now()
        self._plan.stop(now)
        for request, (key, record) in list(self._open.items()):
            del self._open[request]
            self._transport.send(FRONTEND, Cancel(request))
            self.records.append(record.close(now, error="unfinished"))
            self._plan.on_failed(key, now)

    def handle(self, message: Message) -> None:
        """`Output` of a request, or the timer for the next one."""
        if isinstance(message, Output):
            self._on_output(message)
        elif isinstance(message, Timeout):
            self._wake = None
        self._send_due()

    def _on_output(self, output: Output) -> None:
        opened = self._open.get(output.request)
        if opened is None:
            return  # it ended here already
        self.num_outputs += 1
        key, record = opened
        now = self._clock.now()
        if output.tokens:
            record.add_chunk(now, len(output.tokens))
        if output.finish is None and output.error is None:
            return
        del self._open[output.request]
        error = output.error or ("" if output.finish in ("stop", "length") else str(output.finish))
        usage = output.usage
        self.records.append(
            record.close(
                now,
                error=error if usage is not None or error else "no_usage",
                detail=output.detail,
                prompt_tokens=usage.prompt_tokens if usage else 0,
                cached_tokens=usage.cached_tokens if usage else 0,
                output_tokens=usage.output_tokens if usage else 0,
                attempts=output.attempts,
            )
        )
        if error:
            self._plan.on_failed(key, now)
        else:
            self._plan.on_finished(key, now)

    def _send_due(self) -> None:
        now = self._clock.now()
        for send in self._plan.take_due(now):
            request = self._maker.make(send)
            self._open[request.id] = (send.key, OpenRecord(send, request, self._ideal, now))
            self._transport.send(FRONTEND, Submit(request, self._name))
        due = self._plan.next_due
        if due is not None and (self._wake is None or due < self._wake):
            self._wake = due
            self._clock.call_at(due, Timeout("replay", self._name))
