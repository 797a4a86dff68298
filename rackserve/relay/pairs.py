"""Requests of which one worker computes the prompt and another the answer, in the forms vLLM and SGLang ask for."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from rackserve.base.errors import RequestError
from rackserve.relay.forward import Forward, Unanswered
from rackserve.relay.passage import Passage
from rackserve.relay.placer import Booking
from rackserve.relay.prompts import fields_of
from rackserve.relay.upstream import RawHeaders, WorkerFailed

PAIR_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Where the fields of a pair are known to workers."""

_ASK_REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_prefilled = msgspec.json.Decoder(_Prefilled)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def prefill_body(raw: bytes) -> bytes:
    """The request as a vLLM prefill worker gets it: one token, not streamed, its KV kept for a decode worker."""
    fields = fields_of(raw)
    fields["kv_transfer_params"] = _raw(_ASK_REMOTE)
    fields["max_tokens"] = _raw(1)
    fields["stream"] = _raw(False)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _raw(1)
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    return msgspec.json.encode(fields)


def decode_body(raw: bytes, prefilled: bytes) -> bytes:
    """The request as a vLLM decode worker gets it: with where its KV is, as the prefill worker's answer told.

    Raises msgspec.MsgspecError if that answer tells nothing.
    """
    told = _prefilled.decode(prefilled).kv_transfer_params
    if bytes(told) == b"null":
        raise msgspec.ValidationError("the prefill worker's answer has no kv_transfer_params")
    return msgspec.json.encode({**fields_of(raw), "kv_transfer_params": told})


def meeting_body(raw: bytes, host: str, port: int) -> bytes:
    """The request as both SGLang workers get it: with the place where they meet, and a room of its own there."""
    fields = fields_of(raw)
    prompt = bytes(fields.get("prompt", msgspec.Raw(b'""'))).lstrip()
    if prompt.startswith((b'["', b"[[")):
        raise RequestError("a pair of workers takes one prompt at a time; send each alone", param="prompt")
    meeting = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(63)}
    return msgspec.json.encode({**fields, **{name: _raw(value) for name, value in meeting.items()}})


class ForwardPair(Forward):
    """An ASGI application for one path whose answers come from pairs of workers."""

    async def attempt(self, passage: Passage, raw: bytes, booking: Booking, arrived: float) -> None:
        """One try with the pair booked. Raises Unanswered or Broken."""
        if self._relay.config.pairs == "sglang":
            await self._together(passage, raw, booking, arrived)
        else:
            await self._in_turn(passage, raw, booking, arrived)

    async def _prefill(self, passage: Passage, booking: Booking, body: bytes) -> tuple[int, RawHeaders, bytes]:
        """What the prefill worker says, to its end. Raises Unanswered."""
        async with AsyncExitStack() as stack:
            answer = await self.ask(stack, passage, booking.rank, body)
            try:
                said = await answer.whole()
            except WorkerFailed as error:
                raise Unanswered(booking.rank.worker, "no_answer", str(error)) from error
        self._relay.fleet.worker_of(booking.rank).breaker.succeeded()
        if answer.status < 300:
            self._relay.computed(booking)
        return answer.status, answer.headers, said

    async def _in_turn(self, passage: Passage, raw: bytes, booking: Booking, arrived: float) -> None:
        """vLLM: the decode worker is told where the prefill worker keeps the KV, and fetches it."""
        prefilled = await self._prefill(passage, booking, prefill_body(raw))
        if prefilled[0] >= 300:  # its verdict on the request is the client's answer; no decode worker hears of it
            await passage.send_whole(*prefilled)
            return
        try:
            body = decode_body(raw, prefilled[2])
        except msgspec.MsgspecError as error:
            raise RequestError(f"worker {booking.rank.worker}: {error}", code="worker_lost", status=502) from error
        failed: list[str] = []
        while True:
            assert booking.decode is not None
            try:
                async with AsyncExitStack() as stack:
                    answer = await self.ask(stack, passage, booking.decode, body)
                    await self.pass_answer(passage, booking, answer, booking.decode.worker, arrived)
                    return
            except Unanswered as failure:  # the KV is where it was: another decode worker may fetch it
                failed.append(failure.worker)
                if not self._relay.move_decode(booking, failed):
                    raise
                if not self.blame(failure, len(failed)):
                    await self.give_up(passage, failure)
                    return

    async def _together(self, passage: Passage, raw: bytes, booking: Booking, arrived: float) -> None:
        """SGLang: both get the request and meet; whichever fails first ends the other."""
        assert booking.decode is not None
        config = self._relay.fleet.worker_of(booking.rank).config
        body = meeting_body(raw, config.host, config.bootstrap_port)
        async with AsyncExitStack() as stack:
            prefill = asyncio.create_task(self._prefill(passage, booking, body))
            stack.push_async_callback(_end, prefill)
            opening = asyncio.create_task(self.ask(stack, passage, booking.decode, body))
            stack.push_async_callback(_end, opening)
            await asyncio.wait((prefill, opening), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                said = prefill.result()  # raises what it ran into
                if said[0] >= 300:
                    await passage.send_whole(*said)
                    return
            await self.pass_answer(passage, booking, await opening, booking.decode.worker, arrived)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
