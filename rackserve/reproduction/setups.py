"""The set-ups behind the published figures as far as they are known, and what is assumed where they are not."""

from __future__ import annotations

import msgspec

from rackserve.simulated_rack import SimulatedSetup

ACCEPTED = 3.51
SPEED = 387.0
MEDIAN_PROMPT = 142_016
LONG_PROMPT = 549_504
"""P90 of the workload's prompts, all requests."""

RUBIN_RANK_CACHE = 180e9
GB300_RANK_CACHE = 225e9

RACK_PREFILL, RACK_DECODE = 48, 24
SLICE = 12
"""Of a rack of 72 chips one part in so many is simulated, with as small a part of its sessions."""

RUBIN_LANES = (6_000, 12_000, 18_000, 24_000, 30_000, 42_000, 54_000)
GB300_LANES = (600, 3_000, 6_000, 9_000, 12_000, 18_000, 24_000)
"""Live sessions of the whole rack at each point of its curve."""

ASSUMPTIONS = (
    "Workload: sessions drawn like those of the published corpus, or --trace; a start drawn within 25-75 % of each, one "
    "request of each conversation to warm caches, pauses of at most 300 s. Means inside a window differ from the corpus': they "
    "are printed with every run.",
    f"Racks: {RACK_PREFILL} prefill chips in pairs (DEP2) and {RACK_DECODE} decode chips in one group for both racks. "
    "Neither the split nor the sessions at any published point are known.",
    f"Scale: 1/{SLICE} of such a rack is simulated: {RACK_PREFILL // SLICE} prefill and {RACK_DECODE // SLICE} decode chips "
    f"with 1/{SLICE} of the sessions; decode steps take as long as those of the whole group. The 3 and 12 pairs are whole.",
    "Before pooling, sessions are pinned to ranks with a cache of 180 GB each (Rubin) or 225 GB (GB300), as recipes give them; "
    "reading it is free. With the pool: what weights leave of each chip's memory, and 80 % of the trays' host memory.",
    "A fetch takes 200 us and 200 GB/s, one at a time for each group; look-ups do not hold up steps. The n-gram tables lie in "
    "host memory: reading their rows takes time, but what they take of the pool's room is not counted.",
    "A prefill step has at most 32,768 tokens a rank on Rubin, as the published profile, and 8,192 on GB300, as its recipe.",
    "Decode takes a constant 3.51 tokens a step. Pairs in lockstep take the time of their slower rank. 3 and 12 pairs have "
    "4 and 8 decode chips of a group of 32; 12 pairs have 7,000 sessions (neither is published).",
    "Measured for 120 s after 60 s (3 pairs: 240 s after 120 s; the published test's duration is not known). One seed.",
    "Kernels: the coefficients of the cost model, fitted to Rubin's peak, its best single session, one GB300's kernels and "
    "prompts of two GB200. The single session before the rewrites ran on four chips with today's general kernels (assumed).",
)  # fmt: skip


def rubin_curve() -> dict[str, SimulatedSetup]:
    """Points of Rubin's curve by name."""
    return {
        f"rubin-{lanes}": SimulatedSetup(
            chip="vr",
            prefill_groups=RACK_PREFILL // SLICE // 2,
            decode_ranks=RACK_DECODE // SLICE,
            decode_width=RACK_DECODE,
            concurrency=lanes // SLICE,
            accepted=ACCEPTED,
        )
        for lanes in RUBIN_LANES
    }


def gb300_curve() -> dict[str, SimulatedSetup]:
    """Points of GB300's curve by name."""
    return {
        f"gb300-{lanes}": SimulatedSetup(
            chip="gb300",
            prefill_groups=RACK_PREFILL // SLICE // 2,
            decode_ranks=RACK_DECODE // SLICE,
            decode_width=RACK_DECODE,
            concurrency=lanes // SLICE,
            accepted=ACCEPTED,
            pool=False,
            policy="session_affinity",
            rank_cache_bytes=GB300_RANK_CACHE,
            prefill_tokens=8_192,
        )
        for lanes in GB300_LANES
    }


def three_pairs() -> dict[str, SimulatedSetup]:
    """Three prefill pairs under 4,800 sessions: pinned to their ranks, and with the pool."""
    pool = SimulatedSetup(
        chip="vr", prefill_groups=3, concurrency=4_800, decode_ranks=4, decode_width=32, accepted=ACCEPTED,
        settle_s=120, window_s=240,
    )  # fmt: skip
    return {"three-pinned": _pinned(pool), "three-pool": pool}


def twelve_pairs() -> dict[str, SimulatedSetup]:
    """Twelve prefill pairs, sticky and by least uncached work; caches are large enough in both."""
    least = SimulatedSetup(
        chip="vr", prefill_groups=12, concurrency=7_000, decode_ranks=8, decode_width=32, accepted=ACCEPTED,
        settle_s=60, window_s=60,
    )  # fmt: skip
    return {"twelve-sticky": _pinned(least), "twelve-least": least}


def _pinned(setup: SimulatedSetup) -> SimulatedSetup:
    return msgspec.structs.replace(setup, pool=False, policy="session_affinity", rank_cache_bytes=RUBIN_RANK_CACHE)


def all_setups() -> dict[str, SimulatedSetup]:
    """Every set-up that is simulated, the longest runs first."""
    return three_pairs() | twelve_pairs() | rubin_curve() | gb300_curve()
