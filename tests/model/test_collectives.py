"""What devices tell each other is what one process would compute with all parts in hand, to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from rackserve.model.parallel import Share
from tests.model.group_member import ROUNDS, answer, draw, rows_of

SHARES = [Share(t, 2, e, 2) for e in range(2) for t in range(2)]


def run(tp_size: int, ep_size: int, what: str) -> list[Any]:
    """What each device of such a group got."""
    command = (sys.executable, "-m", "tests.model.group_member", str(tp_size), str(ep_size), what)
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def told() -> list[list[dict[str, Any]]]:
    """[device][round] of a group of two ranks of two devices."""
    return run(2, 2, "calls")


@pytest.mark.parametrize("number", range(ROUNDS))
def test_sums_are_taken_in_rank_order_and_parts_joined_in_order(told: list[list[dict[str, Any]]], number: int) -> None:
    for share in SHARES:
        peers = [other for other in SHARES if other.ep_rank == share.ep_rank]
        found = told[share.device][number]
        assert found["sum"] == (draw(peers[0], number, 2, 5) + draw(peers[1], number, 2, 5)).tolist()
        assert found["concat"] == torch.cat([draw(peer, number, 2, 2) for peer in peers], dim=-1).tolist()


@pytest.mark.parametrize("number", range(ROUNDS))
def test_rows_reach_their_rank_by_sender_and_answers_come_home_in_order(told: list[list[dict[str, Any]]], number: int) -> None:
    for share in SHARES:
        peers = [other for other in SHARES if other.tp_rank == share.tp_rank]
        parts = [rows_of(peer, number) for peer in peers]
        found = told[share.device][number]
        assert found["received"] == [row for rows, to in parts for row in rows[to == share.ep_rank].tolist()]
        rows, to = rows_of(share, number)
        assert found["back"] == [answer(row[None], int(rank))[0].tolist() for row, rank in zip(rows, to, strict=True)]


def test_the_trial_has_rounds_without_rows_and_with_all_rows_for_one_rank() -> None:
    counts = [len(rows_of(share, number)[0]) for share in SHARES for number in range(ROUNDS)]
    assert 0 in counts and max(counts) > 3
    sums: list[Tensor] = [rows_of(share, 0)[1] for share in SHARES]
    assert all(int(part.sum()) == 0 for part in sums) and any(len(part) for part in sums)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_flag_of_one_is_seen_by_all_and_values_are_those_of_device_0(told: list[list[dict[str, Any]]], number: int) -> None:
    for share in SHARES:
        assert told[share.device][number]["any"] == (number < len(SHARES))
        assert told[share.device][number]["agree"] == [0.0, number + 0.1]


@pytest.mark.parametrize(("what", "reason"), [("silent", "silent for more than 2 s"), ("gone", "onnection")])
def test_a_peer_that_is_silent_or_gone_is_an_error_that_names_the_group(what: str, reason: str) -> None:
    error = run(2, 1, what)[0]
    assert error.startswith("device 0 of 2 could not gather parts among the 2 devices of rank 0:") and reason in error
