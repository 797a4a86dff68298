"""The production placement over learned records, promises and load: least uncached work, and every booking ends once."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.ids import Rank
from rackserve.base.keys import extend_chain
from rackserve.relay.config import RouteConfig, WorkerConfig
from rackserve.relay.placer import Booking, Placer
from rackserve.relay.prompts import Call
from rackserve.relay.usage import Usage
from rackserve.route.limits import Refusal
from rackserve.route.placement import RouterConfig
from rackserve.text.tokenizer import pack

BLOCK = 4


def call(tokens: list[int], *, session: str = "", max_tokens: int = 0) -> Call:
    return Call("m", session, extend_chain(b"", b"r" * 16, pack(tokens), BLOCK), len(tokens), max_tokens, True)


def config(
    num_workers: int = 3, *, roles: tuple[str, ...] = (), capacity: int = 0, router: RouterConfig | None = None
) -> RouteConfig:
    made = [
        WorkerConfig(f"http://w{number}", roles[number] if roles else "whole", capacity_tokens=capacity)  # type: ignore[arg-type]
        for number in range(len(roles) or num_workers)
    ]
    return RouteConfig(workers=tuple(made), block_tokens=BLOCK, running_tokens=2, router=router or RouterConfig())


RANKS = [Rank(f"w{number}") for number in range(3)]


def placed(placer: Placer, what: Call, ranks: list[Rank] | None = None, decode: list[Rank] | None = None) -> Booking:
    found = placer.place(what, ranks or RANKS, decode)
    assert isinstance(found, Booking)
    return found


def served(placer: Placer, what: Call, now: int = 0) -> Booking:
    booking = placed(placer, what)
    placer.computed(booking, now)
    placer.end(booking)
    placer.check()
    return booking


def test_a_prompt_goes_where_most_of_it_is() -> None:
    placer = Placer(config())
    first = served(placer, call(list(range(100))))
    for length in (100, 140, 90):
        again = served(placer, call(list(range(length))))
        assert again.rank == first.rank
        assert again.claimed >= min(length - BLOCK, 96)


def test_a_burst_of_siblings_finds_the_prefix_that_is_being_computed() -> None:
    placer = Placer(config())
    first = placed(placer, call(list(range(1000))))
    sibling = placed(placer, call([*range(996), 1, 2, 3, 4, 5, 6, 7, 8]))
    assert sibling.rank != first.rank or sibling.claimed >= 996  # waits for the prefix, or computes it elsewhere
    assert placer.load.outstanding(first.rank) <= 1000 + 12


def test_the_switch_to_an_idle_worker_is_where_the_cost_says() -> None:
    placer = Placer(config(2))
    warm = served(placer, call(list(range(80)))).rank
    other = next(rank for rank in RANKS[:2] if rank != warm)
    busy = placed(placer, call(list(range(5000, 5050))), [warm])  # 50 tokens are queued on the warm one
    long = placed(placer, call([*range(80), *range(900, 920)]), RANKS[:2])  # 50 + 20 there, 100 on the idle one
    assert long.rank == warm
    placer.end(long)
    short = placed(placer, call(list(range(40))), RANKS[:2])  # 50 + 4 there, 40 on the idle one
    assert short.rank == other
    placer.end(short)
    placer.end(busy)
    assert placer.is_quiet


def test_idle_ties_are_spread() -> None:
    placer = Placer(config())
    chosen = [served(placer, call(list(range(base, base + 8)))).rank for base in range(1000, 1300, 100)]
    assert sorted(chosen) == RANKS


def test_running_answers_count_so_that_one_worker_does_not_get_all() -> None:
    placer = Placer(msgspec.structs.replace(config(), running_tokens=20))
    served(placer, call(list(range(100))))
    running = []
    for _ in range(30):
        booking = placed(placer, call(list(range(100))))
        placer.computed(booking, 0)
        running.append(booking)
    counts = [placer.load.booked(rank)[1] for rank in RANKS]
    assert min(counts) >= 5
    for booking in running:
        placer.end(booking)
    assert placer.is_quiet


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["place", "computed", "end", "learn", "forget", "expire"]), st.integers(0, 5)), max_size=30
    )
)
def test_whatever_happens_what_is_booked_is_released_once(steps: list[tuple[str, int]]) -> None:
    placer, open_ones = Placer(config(capacity=64)), []
    for now, (kind, number) in enumerate(steps):
        if kind == "place":
            open_ones.append(placed(placer, call([*range(number * 4), *range(50, 50 + number)])))
        elif kind == "forget":
            placer.forget(RANKS[number % 3])
        elif kind == "expire":
            placer.expire(now * 2_000_000)
        elif open_ones:
            booking = open_ones[number % len(open_ones)]
            if kind == "computed":
                placer.computed(booking, now)
            elif kind == "learn":
                placer.learn(booking, Usage(booking.call.tokens, number * BLOCK), now)
            else:
                assert placer.end(booking)
                assert not placer.end(booking)
                open_ones.remove(booking)
        placer.check()
        assert sum(placer.load.booked(rank)[1] for rank in RANKS) == len(open_ones)
    for booking in open_ones:
        placer.end(booking)
    assert placer.is_quiet


def test_what_an_answer_says_corrects_what_was_recorded() -> None:
    placer = Placer(config(1))
    served(placer, call(list(range(100))))
    served(placer, call([*range(60), *range(800, 840)]))
    again = placed(placer, call(list(range(100))), RANKS[:1])
    assert again.claimed == 99  # all but the last, which is always computed
    placer.computed(again, 1)
    placer.learn(again, Usage(100, 40), 1)  # the worker had kept less
    placer.end(again)
    other = placed(placer, call([*range(60), *range(800, 840)]), RANKS[:1])
    assert other.claimed == 60  # that far it was computed again just now; what followed it is gone
    placer.check()


def test_no_more_is_believed_of_a_worker_than_it_can_hold() -> None:
    placer = Placer(config(1, capacity=40))
    for base in (0, 500):
        booking = placed(placer, call(list(range(base, base + 40))), RANKS[:1])
        placer.computed(booking, base)
        placer.end(booking)
    assert placer.index.match(call(list(range(40))).chain) == {}


def test_a_lost_worker_holds_nothing() -> None:
    placer = Placer(config())
    rank = served(placer, call(list(range(100)))).rank
    placer.forget(rank)
    assert placer.index.num_runs == 0


def test_full_workers_refuse_and_nothing_is_booked() -> None:
    placer = Placer(config(router=RouterConfig(max_queued_requests_per_rank=1)))
    bookings = [placed(placer, call([1, 2, 3])) for _ in RANKS]
    refusal = placer.place(call([1, 2, 3]), RANKS)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "overloaded" and refusal.detail.startswith(f"the queues of all {len(RANKS)} workers are full")
    assert placer.place(call([1]), []) == Refusal("unavailable", "no worker is up")
    for booking in bookings:
        placer.end(booking)
    assert placer.is_quiet


def test_a_pair_books_both_halves_and_its_prefill_half_ends_first() -> None:
    placer = Placer(config(roles=("prefill", "decode", "decode")))
    decode = RANKS[1:]
    first = placed(placer, call([1] * 8, max_tokens=5), RANKS[:1], decode)
    second = placed(placer, call([2] * 8, max_tokens=5), RANKS[:1], decode)
    assert [first.decode, second.decode] == decode
    placer.computed(first, 0)
    assert placer.load.booked(RANKS[0])[1] == 1
    assert placer.decode_load.outstanding(decode[0]) == 13
    assert placer.move_decode(first, decode[1:])
    assert placer.decode_load.outstanding(decode[1]) == 26
    assert not placer.move_decode(first, [])
    assert placer.place(call([1]), RANKS[:1], []) == Refusal("unavailable", "no decode worker is up")
    assert placer.place(call([1]), [], decode) == Refusal("unavailable", "no prefill worker is up")
    placer.end(first)
    placer.end(second)
    assert placer.is_quiet


def test_a_worker_that_joins_gets_its_share() -> None:
    placer = Placer(config())
    waiting = [placed(placer, call(list(range(base, base + 40))), RANKS[:2]) for base in range(0, 4000, 100)]
    chosen = [placed(placer, call(list(range(base, base + 40)))).rank for base in range(10_000, 12_000, 100)]
    assert chosen.count(RANKS[2]) == len(chosen)  # until its queue is as long as the others'
    assert placer.load.outstanding(RANKS[2]) <= placer.load.outstanding(RANKS[0]) + 40
    assert len(waiting) == 40
