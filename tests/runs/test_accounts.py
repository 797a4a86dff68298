from __future__ import annotations

from itertools import count as counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.runs.accounts import TenantsConfig
from rackserve.runs.cache import RunCache
from tests.runs.chains import Words

CAPACITY = 12
TENANTS = "abc"
LAWS = settings(derandomize=True, max_examples=150, deadline=None)


class Cache:
    """A cache of CAPACITY blocks that makes room as its owners do. Words of a tenant begin with the tenant's letter."""

    def __init__(self, config: TenantsConfig | None = None, *, needs_window: bool = False) -> None:
        self.words, self.cache = Words(), RunCache(tenants=config, needs_window=needs_window)
        self.fresh = counter()

    def held(self, tenant: str) -> int:
        return sum(account.num_blocks for account in self.cache._accounts if account.tenant == tenant)

    def store(self, word: str, *, reach: bool = False) -> int:
        """Put in what there is room for, from the front; how many blocks are there then."""
        chain, tenant = self.words.chain(word), word[0]
        present = self.cache.present(chain)
        run = self.cache.pin(chain, present) if present else None
        lacking = len(word) - present - (CAPACITY - self.cache.num_blocks)
        if lacking > 0:
            self.cache.evict(lacking, tenant, CAPACITY, reach=reach)
        end = min(len(word), present + CAPACITY - self.cache.num_blocks)
        slots = [next(self.fresh) for _ in range(end - present)]
        self.cache.insert(self.words.chain(word[:end]), slots, present, tenant=tenant)
        if run is not None:
            self.cache.unpin(run)
        self.cache.check()
        return end

    def present(self, word: str) -> int:
        return self.cache.present(self.words.chain(word))


def flood(number: int) -> str:
    """Six blocks of tenant b of which only the first is in any other."""
    return f"b{chr(0x100 + number)}zzzz"


def test_one_tenant_fills_what_nobody_else_wants_and_gives_it_back() -> None:
    cache = Cache()
    for first in "12":
        cache.store(f"a{first}xxxx")
    assert cache.held("a") == 11  # they share the block of the letter a
    cache.store("b12345")
    assert (cache.held("a"), cache.held("b")) == (6, 6)


def test_a_flood_takes_from_itself_once_the_other_has_no_more_than_its_share() -> None:
    cache = Cache(TenantsConfig(turnovers=100))
    cache.store("a12345")
    for number in range(40):
        cache.store(flood(number))
        assert cache.present("a12345") == 6
    assert cache.held("b") == 6


def test_who_holds_less_than_a_share_takes_it_from_who_holds_more() -> None:
    cache = Cache()
    for number in range(20):
        cache.store(flood(number))
    cache.store("a1")
    for number in range(20):
        cache.store(flood(number))
    assert cache.store("a12345") == 6 and cache.held("a") == 6  # its own two blocks were not what had to go


def test_without_a_guarantee_age_alone_decides() -> None:
    cache = Cache(TenantsConfig(guaranteed=0.0))
    cache.store("a12345")
    for number in range(3):
        cache.store(flood(number))
    assert cache.present("a12345") == 0


def test_a_part_that_is_not_guaranteed_goes_by_age() -> None:
    """A third of it is shared out: two blocks each are sure, and the rest of the older ones go."""
    cache = Cache(TenantsConfig(guaranteed=0.34))
    cache.store("a12345")
    for number in range(6):
        cache.store(flood(number))
    assert (cache.held("a"), cache.held("b")) == (2, 10)


def test_a_tenant_that_stays_away_loses_its_share() -> None:
    cache = Cache(TenantsConfig(turnovers=2))
    cache.store("a12345")
    stored = 0
    while cache.present("a12345") == 6:
        cache.store(flood(stored))
        stored += 5
        assert stored < 100
    assert stored > 2 * CAPACITY
    assert Cache(TenantsConfig(turnovers=0)).cache.reach("a", CAPACITY) == 0


def test_a_tenant_that_comes_back_in_time_keeps_it() -> None:
    cache = Cache(TenantsConfig(turnovers=2))
    cache.store("a12345")
    for number in range(100):
        cache.store(flood(number))
        if number % 4 == 3:
            assert cache.cache.match(cache.words.chain("a12345")) == 6


def test_beyond_reach_is_what_only_force_gets() -> None:
    cache = Cache()
    cache.store("a12345")
    cache.store("b12345")
    chain = cache.words.chain("b12345")
    cache.cache.pin(chain, 6)
    assert cache.cache.reach("b", CAPACITY) == 0 and cache.cache.reach("a", CAPACITY) == 6
    assert cache.cache.evict(3, "b", CAPACITY, reach=False).slots == []
    assert len(cache.cache.evict(3, "b", CAPACITY, reach=True).slots) == 3


def test_states_are_divided_like_blocks() -> None:
    fresh = counter()
    cache = Cache(needs_window=True)
    words = cache.words
    for tenant, number in (("a", 2), ("b", 2)):
        for place in range(number):
            word = f"{tenant}{place}"
            at = cache.present(word)
            cache.cache.insert(words.chain(word), [next(fresh) for _ in word[at:]], at, next(fresh), tenant)
    assert cache.cache.num_window_slots == 4
    for _ in range(2):
        assert len(cache.cache.evict_window(1, "b", 4, reach=False).window_slots) == 1
        cache.cache.check()
    assert cache.cache.match(words.chain("a0")) == 2 and cache.cache.match(words.chain("a1")) == 2
    assert cache.cache.match(words.chain("b0")) == 0


WORD = st.tuples(st.sampled_from(TENANTS), st.text("xy", min_size=1, max_size=8)).map("".join)
OPS = st.lists(st.tuples(st.sampled_from(["store", "store", "force", "match", "pin", "unpin"]), WORD), min_size=8, max_size=40)


@LAWS
@given(OPS)
def test_nobody_falls_below_a_share_for_anothers_sake(ops: list[tuple[str, str]]) -> None:
    """Whatever is stored, read and held: what a tenant loses to another, it had beyond its share."""
    cache, pins = Cache(), []
    for op, word in ops:
        before = {tenant: cache.held(tenant) for tenant in TENANTS}
        at = cache.present(word)
        if op in ("store", "force"):
            cache.store(word, reach=op == "force")
        elif op == "match":
            cache.cache.match(cache.words.chain(word))
        elif op == "pin" and at:
            pins.append(cache.cache.pin(cache.words.chain(word), at))
        elif op == "unpin" and pins:
            cache.cache.unpin(pins.pop())
        cache.cache.check()
        share = CAPACITY // len({word[0], *(tenant for tenant in TENANTS if before[tenant])})
        for tenant in TENANTS:
            if op != "force" and tenant != word[0]:
                assert cache.held(tenant) >= min(before[tenant], share)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"guaranteed": 1.1}, {"guaranteed": -0.1}, {"turnovers": -1.0}):
        with pytest.raises(ConfigError, match=f"tenants.{next(iter(wrong))}"):
            TenantsConfig(**wrong)


def test_an_account_that_counts_wrong_is_found() -> None:
    cache = Cache()
    cache.store("a123")
    next(iter(cache.cache._accounts)).num_pinned += 1
    with pytest.raises(InvariantError, match="do not count"):
        cache.cache.check()
