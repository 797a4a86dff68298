"""Pairs: each half is asked in the form its engine knows, and whichever half fails ends the other at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from rackserve.base.errors import RequestError
from rackserve.relay.config import Retries, WorkerRole
from rackserve.relay.pairs import decode_body, meeting_body, prefill_body
from tests.relay.rig import PROMPT, Rig, routing, run, until

ROLES: Sequence[WorkerRole] = ("prefill", "prefill", "decode", "decode")
STREAM = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50, "min_tokens": 5}
KV = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_port": 5}


def body_of(fields: dict[str, object]) -> bytes:
    return msgspec.json.encode(fields)


def test_a_prefill_worker_is_asked_for_one_token_and_to_keep_the_kv() -> None:
    asked = msgspec.json.decode(prefill_body(body_of({**STREAM, "max_completion_tokens": 9, "odd": [1.50]})))
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"]) == (1, 1, False)
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert asked["kv_transfer_params"]["do_remote_prefill"] is False
    assert "stream_options" not in asked
    assert "min_tokens" not in asked
    assert (asked["prompt"], asked["odd"]) == (PROMPT, [1.5])


def test_a_decode_worker_is_told_where_the_kv_is() -> None:
    asked = msgspec.json.decode(decode_body(body_of(STREAM), body_of({"choices": [], "kv_transfer_params": KV})))
    assert asked == {**STREAM, "kv_transfer_params": KV}
    for answer in (b"{}", b'{"kv_transfer_params": null}', b"no json"):
        with pytest.raises(msgspec.MsgspecError):
            decode_body(body_of(STREAM), answer)


def test_a_meeting_has_a_room_of_its_own() -> None:
    rooms = set()
    for _ in range(20):
        asked = msgspec.json.decode(meeting_body(body_of(STREAM), "h", 7))
        assert (asked["bootstrap_host"], asked["bootstrap_port"]) == ("h", 7)
        rooms.add(asked["bootstrap_room"])
    assert len(rooms) == 20
    for prompt in (["a", "b"], [[1], [2]]):
        with pytest.raises(RequestError):
            meeting_body(body_of({"prompt": prompt}), "h", 7)


def seen(rig: Rig) -> list[int]:
    return [len(worker.seen) for worker in rig.workers]


def tell_kv(rig: Rig) -> None:
    for worker in rig.workers[:2]:
        worker.kv_params = KV


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_prefill_first_and_then_decode_streams(path: str) -> None:
    async def test() -> None:
        async with routing(roles=ROLES) as rig:
            tell_kv(rig)
            answer = await rig.post({**STREAM, "messages": []}, path)
            assert answer.text.endswith("data: [DONE]\n\n")
            first = next(worker for worker in rig.workers[:2] if worker.seen).seen[0]
            second = next(worker for worker in rig.workers[2:] if worker.seen).seen[0]
            assert (first.path, second.path) == (path, path)
            assert first.body["max_tokens"] == 1
            assert second.body["kv_transfer_params"] == KV
            assert second.body["stream"] is True
            assert sum(seen(rig)) == 2
            await rig.quiet()

    run(test)


def test_the_prefill_worker_with_the_prefix_is_chosen_again() -> None:
    async def test() -> None:
        async with routing(roles=ROLES) as rig:
            tell_kv(rig)
            for _ in range(4):
                await rig.post(STREAM)
            assert sorted(seen(rig)[:2]) == [0, 4]

    run(test)


@pytest.mark.parametrize("status", [400, 413, 500])
def test_vllm_a_refusal_by_prefill_is_the_answer_and_decode_never_hears(status: int) -> None:
    async def test() -> None:
        async with routing(roles=ROLES) as rig:
            for worker in rig.workers[:2]:
                worker.status = status
            answer = await rig.post(STREAM)
            assert answer.status_code == status
            assert seen(rig)[2:] == [0, 0]
            await rig.quiet()

    run(test)


def test_vllm_another_decode_worker_fetches_when_one_is_gone() -> None:
    async def test() -> None:
        async with routing(roles=ROLES) as rig:
            tell_kv(rig)
            await rig.workers[2].stop()
            rig.relay.fleet.by_name(rig.workers[2].name).up = True
            for _ in range(3):
                assert (await rig.post(STREAM)).status_code == 200
            assert sum(seen(rig)[:2]) == 3  # prefill is not repeated
            await rig.quiet()

    run(test)


def test_vllm_no_decode_worker_left_is_an_error_within_one_try_each() -> None:
    async def test() -> None:
        async with routing(roles=ROLES, retries=Retries(attempts=2)) as rig:
            tell_kv(rig)
            for worker in rig.workers[2:]:
                worker.status = 503
            assert (await rig.post(STREAM)).status_code == 503
            assert sum(seen(rig)[2:]) <= 4
            await rig.quiet()

    run(test)


def test_vllm_an_answer_without_kv_is_an_error() -> None:
    async def test() -> None:
        async with routing(roles=ROLES) as rig:
            answer = await rig.post(STREAM)
            assert answer.status_code == 502
            assert "kv_transfer_params" in answer.json()["error"]["message"]
            await rig.quiet()

    run(test)


def test_sglang_both_halves_meet() -> None:
    async def test() -> None:
        async with routing(roles=ROLES, pairs="sglang") as rig:
            answer = await rig.post(STREAM)
            assert answer.text.endswith("data: [DONE]\n\n")
            both = [worker.seen[0].body for worker in rig.workers if worker.seen]
            assert len(both) == 2
            assert both[0] == both[1]
            assert both[0]["bootstrap_host"] == "127.0.0.1"
            await rig.quiet()

    run(test)


@pytest.mark.parametrize("failing", [slice(0, 2), slice(2, 4)])
def test_sglang_the_half_that_fails_ends_the_other(failing: slice) -> None:
    async def test() -> None:
        async with routing(roles=ROLES, pairs="sglang") as rig:
            for worker in rig.workers:
                worker.hold = asyncio.Event()
            for worker in rig.workers[failing]:
                worker.hold, worker.status = None, 400 if failing.start == 0 else 503
            answer = await rig.post(STREAM)
            assert answer.status_code == (400 if failing.start == 0 else 503)
            await rig.quiet()  # the half that held on was let go

    run(test)


def test_sglang_the_other_decode_worker_is_tried_with_a_new_room() -> None:
    async def test() -> None:
        async with routing(roles=ROLES, pairs="sglang") as rig:
            rig.workers[2].status = 503
            for _ in range(2):
                assert (await rig.post(STREAM)).status_code == 200
            rooms = [call.body["bootstrap_room"] for worker in rig.workers[2:] for call in worker.seen]
            assert len(rooms) == len(set(rooms)) >= 2
            await rig.quiet()

    run(test)


@pytest.mark.parametrize(("pairs", "held"), [("vllm", slice(0, 2)), ("vllm", slice(2, 4)), ("sglang", slice(0, 4))])
def test_a_client_that_hangs_up_ends_both_halves(pairs: str, held: slice) -> None:
    async def test() -> None:
        async with routing(roles=ROLES, pairs=pairs) as rig:  # type: ignore[arg-type]
            tell_kv(rig)
            for worker in rig.workers[held]:
                worker.hold = asyncio.Event()
            call = asyncio.create_task(rig.post(STREAM))
            await until(lambda: any(worker.num_open for worker in rig.workers[held]))
            call.cancel()
            await rig.quiet()
            assert rig.count("requests", "hung_up") == 1

    run(test)


def test_paths_that_know_no_pairs_are_not_there() -> None:
    async def test() -> None:
        async with routing(roles=ROLES) as rig:
            assert (await rig.post(STREAM, "/v1/messages")).status_code == 404

    run(test)
