"""Every seam at which KV, resume state or token history could be one position off: output must equal a cold server's."""

from __future__ import annotations

from typing import Any

import pytest

from rackserve.base.events import Preempted
from tests.nodes.rig import BLOCK, MODELS, MS, Rig, prompt


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("end", ["length", "stop", "cancelled"])
def test_a_turn_may_end_at_any_place_and_the_next_one_equals_cold(end: str, offset: int, model: dict[str, Any]) -> None:
    """The token sampled last is known but not computed: it must never count as cached."""
    rig = Rig(model=model, topology={"pool": True})
    first = rig.submit("probe", prompt(9), 30)
    rig.rest()
    num_output = 2 * BLOCK - 1 + offset  # prompt and output end at a block border, or one token beside it
    assert (9 + num_output - offset) % BLOCK == 0
    stop = (first.tokens[num_output - 1],) if end == "stop" else ()
    if stop:
        assert first.tokens.index(stop[0]) == num_output - 1
    rig = Rig(model=model, topology={"pool": True})
    turn = rig.submit("turn1", prompt(9), 30 if end != "length" else num_output, stop=stop)
    if end == "cancelled":
        while len(turn.tokens) < num_output:
            rig.run(MS // 4)
        rig.cancel("turn1")
    rig.rest()
    assert turn.finish == end
    history = prompt(9) + turn.tokens
    again = rig.submit("turn2", history + prompt(3, 1), 5)
    rig.rest()
    assert again.usage is not None
    assert again.usage.cached_tokens <= len(history) - 1
    if end != "cancelled":
        whole = (len(history) - 1) // BLOCK * BLOCK
        assert again.usage.cached_tokens == max(0, whole - rig.layout.replay_tokens)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunks_of_any_size_give_the_same_output(chunk: int, model: dict[str, Any]) -> None:
    rig = Rig(model=model, scheduler={"max_batched_tokens": chunk})
    rig.submit("a", prompt(13), 6)
    rig.submit("b", prompt(10, 1), 6, at=3 * MS)
    rig.rest()


@pytest.mark.parametrize("model", MODELS)
def test_a_warm_prefix_may_end_at_any_offset(model: dict[str, Any]) -> None:
    rig = Rig(model=model, topology={"pool": True, "prefill_workers": 2})
    for length in range(1, 14):
        answer = rig.submit(f"r{length}", prompt(20)[:length] + prompt(7, length), 4)
        rig.rest()
        assert answer.finish == "length"


@pytest.mark.parametrize("model", MODELS)
def test_a_preempted_sequence_resumes_with_the_history_of_its_own_tokens(model: dict[str, Any]) -> None:
    rig = Rig(model=model, topology={"decode_blocks": 12})
    for number in range(3):
        rig.submit(f"r{number}", prompt(10, number), 24, at=number * 2 * MS)
    rig.rest()
    assert rig.events_of(Preempted)
    assert all(answer.finish == "length" for answer in rig.client.answers.values())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_draft", "in_flight"), [(0, 1), (0, 2), (1, 1), (3, 1)])
def test_drafts_and_steps_in_flight_change_no_token_beside_neighbours(
    num_draft: int, in_flight: int, model: dict[str, Any]
) -> None:
    rig = Rig(model=model, scheduler={"num_draft": num_draft, "max_steps_in_flight": in_flight, "max_sequences": 3})
    for number in range(7):  # places in the batch are used again
        rig.submit(f"r{number}", prompt(5 + number, number), 9, at=number * 4 * MS, seed=number if number % 2 else None)
    rig.rest()
    assert all(answer.finish == "length" for answer in rig.client.answers.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_in_lockstep_give_the_same_output_as_single_ones(ranks: int) -> None:
    rig = Rig(topology={"prefill_ranks": ranks, "decode_ranks": ranks, "pool": True})
    answers = [rig.submit(f"r{number}", prompt(6 + number, number % 3), 7) for number in range(8)]
    rig.rest()
    assert all(answer.tokens == rig.cold(answer) for answer in answers)
