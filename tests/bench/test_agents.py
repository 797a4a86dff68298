from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.units import to_ns
from rackserve.bench.agents import separate_agents
from rackserve.bench.session import Session, Subagent, TraceRequest, requests_of
from tests.bench.toys import ids, request, session


def ask(at_s: float, api_s: float, *blocks: int, model: str = "") -> TraceRequest:
    return msgspec.structs.replace(request(at_s, api_s, blocks), model=model)


def agents(made: Session) -> dict[str, list[float]]:
    """Sending times in seconds by agent; the main conversation is ''."""
    found: dict[str, list[float]] = {"": [e.at_ns / 1e9 for e in made.entries if isinstance(e, TraceRequest)]}
    for entry in made.entries:
        if isinstance(entry, Subagent):
            found[entry.id] = [(entry.at_ns + r.at_ns) / 1e9 for r in requests_of(entry.entries)]
    return found


def test_a_plain_conversation_stays_whole() -> None:
    made = session("a", ask(0, 1, 1), ask(5, 1, 1, 2), ask(9, 1, 1, 2, 3))
    assert separate_agents(made) == made


def test_a_request_that_builds_on_an_unfinished_answer_is_another_agents() -> None:
    made = session("a", ask(0, 9, 1), ask(5, 1, 1, 2), ask(10, 1, 1, 3), ask(11, 1, 1, 2, 4))
    assert agents(separate_agents(made)) == {"": [0, 10], "fan0": [5, 11]}


def test_another_model_is_another_agent_and_a_single_call_of_it_a_call_on_the_side() -> None:
    made = session("a", ask(0, 1, 1, model="big"), ask(5, 1, 1, 2, model="small"), ask(9, 1, 1, 2, 3, model="big"))
    assert agents(separate_agents(made)) == {"": [0, 9], "aux0": [5]}


def test_a_compaction_goes_on_with_the_same_conversation() -> None:
    """Nobody ever builds on the longer prompt again, so the shorter one that follows is the same agent's."""
    made = session("a", ask(0, 1, 1, 2, 3, 4), ask(5, 1, 1, 2, 9), ask(8, 1, 1, 2, 9, 10))
    assert separate_agents(made) == made


def test_when_the_longer_prompt_goes_on_the_shorter_one_was_another_agent() -> None:
    made = session("a", ask(0, 1, 1, 2, 3), ask(5, 1, 1, 2, 9), ask(7, 1, 1, 2, 9, 10), ask(8, 1, 1, 2, 3, 4))
    assert agents(separate_agents(made)) == {"": [0, 8], "fan0": [5, 7]}


def test_much_later_with_little_in_common_is_another_conversation() -> None:
    late = session("a", ask(0, 1, 1, 2, 3, 4, 5), ask(3_700, 1, 1, 9), ask(3_702, 1, 1, 9, 10))
    assert agents(separate_agents(late)) == {"": [0], "fan0": [3_700, 3_702]}
    half = session("a", ask(0, 1, 1, 2, 3, 4), ask(3_700, 1, 1, 2, 9))
    assert separate_agents(half) == half
    soon = session("a", ask(0, 1, 1, 2, 3, 4, 5), ask(3_500, 1, 1, 9))
    assert separate_agents(soon) == soon


def test_three_at_once_from_one_prompt_are_a_wide_group() -> None:
    turns = [ask(0, 1, 1, 2), ask(2, 30, 1, 2, 3, 4, 5, 6)]
    for n in range(3):
        turns += [ask(4 + n, 5, 1, 2, 20 + n, 30 + n), ask(12 + n, 5, 1, 2, 20 + n, 30 + n, 40 + n)]
    made = agents(separate_agents(session("a", *turns)))
    assert made == {"": [0, 2], "wide0": [4, 12], "wide1": [5, 13], "wide2": [6, 14]}


def test_a_title_that_shares_nothing_stays_with_the_main_conversation() -> None:
    made = session("a", ask(0, 1, 77), ask(1, 1, 1), ask(5, 1, 1, 2))
    assert separate_agents(made) == made


def test_agents_run_from_their_first_sending_to_their_last_answer_and_joins_follow() -> None:
    made = separate_agents(session("a", ask(0, 1, 1, 2), ask(3, 4, 8), ask(4, 1, 8, 9), ask(9, 1, 8, 10), ask(10, 1, 1, 2, 3)))
    sub = next(e for e in made.entries if isinstance(e, Subagent) and len(e.entries) == 2)
    assert (sub.at_ns, sub.end_ns) == (to_ns(3), to_ns(10))
    assert made.entries[-1].at_ns == to_ns(10), "a turn that could join it comes after it"


def test_recorded_subagents_are_separated_inside() -> None:
    inner = (ask(0, 9, 5), ask(1, 1, 5, 6), ask(10, 1, 5, 7))
    made = separate_agents(session("a", ask(0, 1, 1), Subagent("x", to_ns(2), to_ns(20), inner)))
    sub = made.entries[1]
    assert isinstance(sub, Subagent)
    assert agents(Session("x", 4, sub.entries)) == {"": [0, 10], "aux0": [1]}


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 9), st.lists(st.sampled_from("ab"), max_size=4), st.sampled_from("MN")),
        min_size=1,
        max_size=12,
    )
)
def test_no_request_is_lost_and_no_agent_asks_before_its_last_answer_or_another_model(
    asked: Sequence[tuple[int, int, list[str], str]],
) -> None:
    names: dict[str, int] = {}
    turns = []
    for at, took, path, model in sorted(asked, key=lambda each: each[0]):
        blocks = [names.setdefault("".join(path[: n + 1]), len(names)) for n in range(len(path))]
        turns.append(TraceRequest(to_ns(at), to_ns(took), max(1, 4 * len(blocks)), 1, ids(*blocks), model))
    made = separate_agents(session("a", *turns))
    flat = [(r.at_ns, r) for r in made.entries if isinstance(r, TraceRequest)]
    for entry in made.entries:
        if isinstance(entry, Subagent):
            assert entry.entries[0].at_ns == 0
            inner = list(requests_of(entry.entries))
            assert len({r.model for r in inner}) == 1
            assert all(b.at_ns >= a.end_ns for a, b in pairwise(inner))
            flat += [(entry.at_ns + r.at_ns, r) for r in inner]
    key = [(at, r.api_ns, r.hash_ids, r.model) for at, r in flat]
    assert sorted(key) == sorted((t.at_ns, t.api_ns, t.hash_ids, t.model) for t in turns)
