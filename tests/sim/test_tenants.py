"""Tenants in one rack: a flood by one leaves the others what they had, and none finds what another has asked."""

from __future__ import annotations

from typing import Any

import pytest

from rackserve.base.rng import draw_below
from rackserve.base.units import NS_PER_MS
from rackserve.runs.accounts import TenantsConfig
from rackserve.sim.checks import check_at_rest
from tests.nodes.rig import VOCAB, Answer, Rig, prompt

SESSIONS = 4
TURNS = 10
PAUSE = 120 * NS_PER_MS
FLOOD = 5
"""Requests of the other tenant for each turn of all sessions."""

AGAIN = 20
"""Every so many prompts are asked again by whom they are from."""

SHAPES: dict[str, dict[str, Any]] = {
    "a pool beside small ranks": {"prefill_workers": 2, "prefill_blocks": 64, "pool": True, "segment_blocks": 110},
    "a rank's own cache alone": {"prefill_blocks": 330, "decode_blocks": 64},
}


def hit_rate(shape: dict[str, Any], tenants: TenantsConfig, *, flood: bool) -> float:
    """Of the sessions of tenant a, over all turns but the first; one session's turn follows the other."""
    rig = Rig(topology=shape, tenants=tenants, max_requests=10_000)
    rig.host.after_event = lambda: None  # too dear for so many; the laws at rest are checked at the end
    answers: list[Answer] = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            tokens = prompt(40 + 12 * turn, session)
            at = (turn * SESSIONS + session) * PAUSE
            answer = rig.submit(f"a{session}/{turn}", tokens, 2, at=at, session=f"a{session}", tenant="a")
            if turn:
                answers.append(answer)
            for number in range(FLOOD if flood else 0):
                name = f"b{turn}/{session}/{number}"
                unseen = [draw_below(VOCAB, name, place) for place in range(100)]
                rig.submit(name, unseen, 1, at=at + number * PAUSE // FLOOD, tenant="b")
    rig.rest()
    assert all(answer.finish == "length" for answer in rig.client.answers.values())
    usages = [answer.usage for answer in answers if answer.usage is not None]
    return sum(usage.cached_tokens for usage in usages) / sum(usage.prompt_tokens for usage in usages)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_flood_costs_another_tenant_at_most_five_points_of_its_hit_rate(shape: str) -> None:
    quiet = hit_rate(SHAPES[shape], TenantsConfig(), flood=False)
    flooded = hit_rate(SHAPES[shape], TenantsConfig(), flood=True)
    unguarded = hit_rate(SHAPES[shape], TenantsConfig(guaranteed=0.0), flood=True)
    assert quiet > 0.8
    assert flooded > quiet - 0.05
    assert unguarded < quiet - 0.2, "the flood is one that would be felt"


def test_of_a_thousand_prompts_of_one_tenant_none_is_found_by_another() -> None:
    """In no tier and by no router: what the other tenant sends is planned, placed and computed as if it were new."""
    rig = Rig(topology={"prefill_workers": 2, "pool": True, "segment_blocks": 200}, max_requests=10_000)
    rig.host.after_event = lambda: None
    pairs = 1_000
    for number in range(pairs):
        tokens = [number % VOCAB, number // VOCAB, *(draw_below(VOCAB, "pair", number, place) for place in range(18))]
        at = number * 20 * NS_PER_MS
        for place, tenant in enumerate(("a", "b", "a") if number % AGAIN == 0 else ("a", "b")):
            rig.submit(f"{tenant}{place}/{number}", tokens, 1, at=at + place * 9 * NS_PER_MS, tenant=tenant)
    rig.run()
    check_at_rest(rig.rack)
    cached = {name: answer.usage.cached_tokens for name, answer in rig.client.answers.items() if answer.usage is not None}
    assert len(cached) == 2 * pairs + pairs // AGAIN
    assert not any(tokens for name, tokens in cached.items() if name[:2] in ("a0", "b1"))
    assert all(cached[f"a2/{number}"] == 16 for number in range(0, pairs, AGAIN))
