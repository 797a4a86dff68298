from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from rackserve.api.gateway import Gateway
from rackserve.base.errors import InvariantError
from rackserve.base.messages import Cancel, Message, Output, Submit
from rackserve.base.request import Request, Usage
from rackserve.base.step import TokenLogprobs
from tests.api.rig import Script, ScriptedFrontend, run, text


def request(name: str = "r", max_tokens: int = 8) -> Request:
    return Request(name, "s", b"", b"", 5, max_tokens)


class Wire:
    """A transport that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, to: str, message: Message) -> None:
        self.sent.append(message)


async def collect(gateway: Gateway, wanted: Request) -> list[Output]:
    return [output async for output in gateway.generate(wanted)]


def received(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.tokens)


def test_each_token_arrives_once_and_the_last_output_ends() -> None:
    async def scene() -> None:
        frontend = ScriptedFrontend(lambda _: Script(ids=(5, 6, 7), groups=(2, 1)))
        outputs = await collect(frontend.gateway, request())
        assert received(outputs) == (5, 6, 7)
        assert outputs[-1].finish == "stop" and outputs[-1].usage == Usage(5, 0, 3)
        assert frontend.cancelled == [] and frontend.gateway.num_open == 0

    run(scene())


def test_outputs_that_wait_for_a_slow_reader_are_joined() -> None:
    async def scene() -> None:
        wire = Wire()
        gateway = Gateway(wire)
        stream = gateway.generate(request())
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        for index in range(4):
            gateway.handle(Output("r", index, (index,), finish="length" if index == 3 else None))
        assert await first == Output("r", 0, (0, 1, 2, 3), finish="length")
        assert [output async for output in stream] == []
        assert [type(message) for message in wire.sent] == [Submit]

    run(scene())


def test_an_output_that_waits_is_read_even_if_the_answer_is_ended_behind_it() -> None:
    async def scene() -> None:
        wire = Wire()
        gateway = Gateway(wire)
        stream = gateway.generate(request())
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        gateway.handle(Output("r", 0, (7,)))
        gateway.close("over")
        assert await first == Output("r", 0, (7,), error="draining", detail="over")
        assert [output async for output in stream] == []

    run(scene())


def test_scores_of_the_prompt_reach_the_reader_once_however_late_it_reads() -> None:
    async def scene() -> None:
        gateway = Gateway(Wire())
        reading = asyncio.create_task(collect(gateway, request()))
        await asyncio.sleep(0)
        scores = (TokenLogprobs(-0.5, ()), TokenLogprobs(-1.0, ()))
        gateway.handle(Output("r", 0, (5,), prompt_logprobs=scores))
        gateway.handle(Output("r", 1, (6,), finish="stop", usage=Usage(5, 0, 2)))
        outputs = await reading
        assert [output.prompt_logprobs for output in outputs if output.prompt_logprobs] == [scores]

    run(scene())


@pytest.mark.parametrize("read", [False, True])
def test_leaving_early_cancels_exactly_once(read: bool) -> None:
    async def scene() -> None:
        frontend = ScriptedFrontend(lambda _: Script(ids=(5, 6), hold=True))
        async with aclosing(frontend.gateway.generate(request())) as stream:
            task = asyncio.create_task(anext(stream))
            while read and not task.done():
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        frontend.gateway.cancel("r")
        expected = ["r"] if frontend.submitted else []
        assert frontend.cancelled == expected and frontend.gateway.num_open == 0

    run(scene())


def test_a_reader_that_cancels_may_stay_for_the_usage() -> None:
    async def scene() -> None:
        frontend = ScriptedFrontend(lambda _: Script(ids=(5,), hold=True, cached=4))
        outputs = []
        async with aclosing(frontend.gateway.generate(request())) as stream:
            async for output in stream:
                outputs.append(output)
                frontend.gateway.cancel("r")
        assert outputs[-1].finish == "cancelled" and outputs[-1].usage == Usage(5, 4, 1)
        assert frontend.cancelled == ["r"]

    run(scene())


def test_every_wait_ends() -> None:
    async def scene() -> None:
        wire = Wire()
        outputs = await collect(Gateway(wire, wait_s=0.01), request())
        assert [output.error for output in outputs] == ["timeout"]
        assert wire.sent[1:] == [Cancel("r")]

    run(scene())


def test_tokens_seen_before_are_skipped_and_a_gap_is_an_error() -> None:
    async def scene() -> None:
        wire = Wire()
        gateway = Gateway(wire)
        task = asyncio.create_task(collect(gateway, request()))
        await asyncio.sleep(0)
        gateway.handle(Output("r", 0, (1, 2)))
        gateway.handle(Output("r", 1, (2, 3)))
        gateway.handle(Output("r", 0, (1,)))
        gateway.handle(Output("r", 4, (5,)))
        gateway.handle(Output("r", 3, (4,)))
        outputs = await task
        assert received(outputs) == (1, 2, 3)
        assert outputs[-1].error == "output_lost" and wire.sent[1:] == [Cancel("r")]

    run(scene())


def test_more_tokens_than_asked_for_are_not_kept() -> None:
    async def scene() -> None:
        wire = Wire()
        gateway = Gateway(wire)
        task = asyncio.create_task(collect(gateway, request(max_tokens=2)))
        await asyncio.sleep(0)
        gateway.handle(Output("r", 0, (1, 2, 3)))
        outputs = await task
        assert received(outputs) == () and outputs[-1].error == "internal"

    run(scene())


def test_closing_ends_every_open_answer_and_refuses_new_ones() -> None:
    async def scene() -> None:
        frontend = ScriptedFrontend(lambda _: Script(ids=(5,), hold=True))
        gateway = frontend.gateway
        tasks = [asyncio.create_task(collect(gateway, request(name))) for name in ("a", "b")]
        await frontend.held.wait()
        gateway.close("going down")
        await gateway.wait_idle()
        for outputs in await asyncio.gather(*tasks):
            assert (outputs[-1].error, outputs[-1].detail) == ("draining", "going down")
        assert sorted(frontend.cancelled) == ["a", "b"]
        assert [output.error for output in await collect(gateway, request("c"))] == ["draining"]
        assert len(frontend.submitted) == 2

    run(scene())


def test_output_of_readers_that_left_is_dropped() -> None:
    async def scene() -> None:
        gateway = Gateway(Wire())
        gateway.handle(Output("nobody", 0, (1,)))
        gateway.cancel("nobody")
        assert gateway.num_open == 0

    run(scene())


def test_two_requests_of_one_name_are_a_bug() -> None:
    async def scene() -> None:
        frontend = ScriptedFrontend(lambda _: text("abc"))
        async with aclosing(frontend.gateway.generate(request())) as stream:
            await anext(stream)
            with pytest.raises(InvariantError):
                await anext(frontend.gateway.generate(request()))

    run(scene())
