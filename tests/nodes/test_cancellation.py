"""Clients leave by the thousand, at every stage of a request: all is given back, and what they wanted is not computed."""

from __future__ import annotations

import pytest

from rackserve.base.events import StepDone
from rackserve.base.messages import Placed, Prefill, TokensEmitted
from rackserve.base.rng import draw_below
from rackserve.base.units import NS_PER_MS, NS_PER_US
from rackserve.sim.checks import check_at_rest
from tests.nodes.rig import Rig, prompt

LEAVERS = 2_000
AT_ONCE = 20


def test_thousands_that_leave_at_any_time_leave_a_rack_as_it_was() -> None:
    """With a pool and two ranks of each role; a tenth stays. Laws of a rack at rest are checked at the end of each wave."""
    rig = Rig(topology={"prefill_workers": 2, "decode_workers": 2, "pool": True}, max_requests=AT_ONCE)
    rig.host.after_event = lambda: None  # too dear for so many; what holds at rest is what this is about
    kept, left, at = [], 0, 0
    for number in range(LEAVERS):
        name = f"{number}"
        at += draw_below(2_000, "pause", number) * NS_PER_US
        answer = rig.submit(name, prompt(20 + draw_below(60, "length", number), number % 50), 8, at=at)
        if number % 10:
            rig.cancel(name, at + draw_below(30_000, "leave", number) * NS_PER_US)
            left += 1
        else:
            kept.append(answer)
        if number % AT_ONCE == AT_ONCE - 1:
            rig.run()
            check_at_rest(rig.rack)
            at = rig.host.now
    rig.rest()
    ends = [answer.finish for answer in rig.client.answers.values()]
    assert ends.count("cancelled") > left // 2
    assert all(answer.finish == "length" for answer in kept)


@pytest.mark.parametrize("moment", [Placed, Prefill, TokensEmitted])
def test_compute_stops_within_two_steps_of_leaving(moment: type[Placed | Prefill | TokensEmitted]) -> None:
    rig = Rig(topology={"prefill_blocks": 256, "decode_blocks": 512})
    rig.on_message(moment, lambda: rig.cancel("leaver"))
    rig.submit("leaver", prompt(600), 1_000)
    rig.run(3_000 * NS_PER_MS)
    begun = next(at for at, _, _, message in rig.sent if isinstance(message, moment))
    steps = [at for at, _, event in rig.events if isinstance(event, StepDone) and at > begun]
    assert len(steps) <= 2
    rig.rest()
