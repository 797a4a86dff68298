"""Replay statistics equal those of a second, naive replayer, over drawn trees and over recorded sessions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.rng import draw_below
from rackserve.base.units import NS_PER_S, to_ns
from rackserve.bench.agents import separate_agents
from rackserve.bench.closed_loop import Replay
from rackserve.bench.demo import demo_sessions
from rackserve.bench.plan import IdleCaps, Send
from rackserve.bench.session import Session
from tests.bench.reference import replay
from tests.bench.test_closed_loop import trees
from tests.bench.toys import drive


def both(
    sessions: Sequence[Session],
    lanes: int,
    *,
    caps: IdleCaps,
    until_s: float = 1e9,
    slow: int = 7,
    recycle: bool = False,
    window: tuple[float, float] | None = None,
    further: int = 0,
    seed: int = 42,
) -> tuple[dict[str, tuple[float, float, bool]], dict[str, tuple[float, float, bool]]]:
    """The package's and the reference's account of one replay: request -> (sent, ended, warm-up), in seconds."""

    def answer_s(tree: str, stream: int, turn: int) -> int:
        return draw_below(slow, "answer", tree, stream, turn)

    warm: set[str] = set()

    def ask(send: Send) -> float:
        if send.warmup:
            warm.add(str(send.key))
            assert send.request.output_tokens == 1
        return answer_s(send.key.tree, send.key.stream, send.key.turn)

    plan = Replay(
        sessions, lanes, caps=caps, recycle=recycle, start_window=window, warmup_requests=further if window else 0, seed=seed
    )
    ours = {key: (*times, key in warm) for key, times in drive(plan, ask, until_s=until_s).items()}
    log = replay(
        sessions,
        lanes,
        lambda *which: to_ns(answer_s(*which)),
        tree_cap=caps.tree_ns,
        system_cap=caps.system_ns,
        until=to_ns(until_s),
        recycle=recycle,
        window=window,
        further=further if window else 0,
        seed=seed,
    )
    return ours, {key: (sent / NS_PER_S, ended / NS_PER_S, warmup) for key, (sent, ended, warmup) in log.items()}


@settings(derandomize=True, max_examples=250, deadline=None)
@given(
    trees(),
    st.integers(1, 3),
    st.sampled_from([(300, 10), (20, 1_000), (1_000, 5), (9, 4)]),
    st.sampled_from([None, (0.25, 0.75), (0.0, 1.0)]),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_drawn_trees_replay_as_in_the_reference(
    sessions: list[Session],
    lanes: int,
    caps: tuple[int, int],
    window: tuple[float, float] | None,
    further: int,
    recycle: bool,
    seed: int,
) -> None:
    limits = IdleCaps(to_ns(caps[0]), to_ns(caps[1]))
    until = 150.0 if recycle else 1e9
    slow = 1 + 1 + seed % 6
    ours, theirs = both(
        sessions, lanes, caps=limits, until_s=until, slow=slow, recycle=recycle, window=window, further=further, seed=seed
    )
    assert ours == theirs


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize(("window", "further"), [(None, 0), ((0.25, 0.75), 0), ((0.25, 0.75), 10)])
def test_recorded_sessions_replay_as_in_the_reference(lanes: int, window: tuple[float, float] | None, further: int) -> None:
    sessions = [separate_agents(session) for session in demo_sessions()]
    ours, theirs = both(sessions, lanes, caps=IdleCaps(), until_s=3_600, recycle=True, window=window, further=further)
    assert ours == theirs
    assert len(ours) > 50
    assert any(warmup for _, _, warmup in ours.values()) is (window is not None)
