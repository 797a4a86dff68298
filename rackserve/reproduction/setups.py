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
SLICE = 24
"""Of a rack of 72 chips one part in so many is simulated, with as small a part of its sessions."""

RUBIN_LANES = (12_000, 18_000, 24_000, 30_000, 36_000)
GB300_LANES = (6_000, 9_000, 12_000, 18_000)
"""Live sessions of the whole rack at each point of its curve."""

RECIPE_LANES = (64, 128, 256)
"""Live sessions of the published recipe for fast GB300s: 4 prefill and 16 decode chips."""

WARMUP_REQUESTS = 10
JOINED_S = 900.0
"""A published run is measured for an hour; a rack is simulated from this second of it on."""

STEP_TIMES = {"slow": 1.05, "fast": 0.95}
"""Factors under which the pairs are run again on demand."""

ASSUMPTIONS = (
    "Workload: sessions drawn like those of the published corpus, or --trace; a start drawn within 25-75 % of each, one "
    f"request of each conversation and {WARMUP_REQUESTS} more of each session to warm caches, pauses of at most 300 s, new "
    "sessions in place of those that end.",
    f"Time: the benchmark measures for an hour, in which prompts grow. Racks join {JOINED_S:.0f} s into it, when prompts and "
    "misses are about those of the whole hour; until then a request takes 0.5 s and its tokens 387 a second, and what caches "
    "hold then is sent to them first. Measured for 120 s after 60 s (3 pairs: after 120 s; 12 pairs: 60 s after 30 s).",
    f"Racks: {RACK_PREFILL} prefill chips in pairs (DEP2) and {RACK_DECODE} decode chips in one group for both racks. "
    "Neither the split nor the sessions at any published point are known.",
    f"GB300 at 387 tok/s/user: the shape of its published recipe, 4 prefill chips (DEP4) and 16 decode chips (DEP16) with "
    f"{RECIPE_LANES[0]} to {RECIPE_LANES[-1]} sessions; sessions stay at their rank.",
    f"Scale: 1/{SLICE} of such a rack is simulated: {RACK_PREFILL // SLICE} prefill and {RACK_DECODE // SLICE} decode chips "
    f"with 1/{SLICE} of the sessions; decode steps take as long as those of the whole group. The 3 and 12 pairs and the recipe "
    "are whole.",
    "Before pooling, sessions are pinned to ranks with a cache of 180 GB each (Rubin) or 225 GB (GB300), as recipes give them; "
    "reading it is free, and what it parted with is computed again. With the pool: what weights leave of each chip's memory, "
    "and 80 % of the trays' host memory. A cached token takes 890 bytes.",
    "A fetch takes 200 us and 200 GB/s, one at a time for each group; look-ups do not hold up steps. The n-gram tables lie in "
    "host memory: reading their rows takes time, but what they take of the pool's room is not counted.",
    "A prefill step has at most 32,768 tokens a rank on Rubin, as the published profile, and 8,192 on GB300, as its recipe.",
    "Decode takes a constant 3.51 tokens a step. Pairs in lockstep take the time of their slower rank. 3 and 12 pairs have "
    "4 and 8 decode chips of a group of 32; 12 pairs have 7,000 sessions (neither is published).",
    "Kernels: the coefficients of the cost model, fitted to Rubin's peak, its best single session, one GB300's kernels and "
    "single step, and prompts of two GB200. The single session before the rewrites ran on four chips with today's "
    "general kernels (assumed).",
)


def _slice(chip: str, lanes: int) -> SimulatedSetup:
    return SimulatedSetup(
        chip=chip,
        prefill_groups=RACK_PREFILL // SLICE // 2,
        decode_ranks=RACK_DECODE // SLICE,
        decode_width=RACK_DECODE,
        concurrency=lanes // SLICE,
        accepted=ACCEPTED,
        warmup_requests=WARMUP_REQUESTS,
        joined_s=JOINED_S,
    )


def _gb300(setup: SimulatedSetup) -> SimulatedSetup:
    """Before the pool, and in steps as small as its recipe's."""
    return msgspec.structs.replace(
        setup, pool=False, policy="session_affinity", rank_cache_bytes=GB300_RANK_CACHE, prefill_tokens=8_192
    )


def rubin_curve() -> dict[str, SimulatedSetup]:
    """Points of Rubin's curve by name."""
    return {f"rubin-{lanes}": _slice("vr", lanes) for lanes in RUBIN_LANES}


def gb300_curve() -> dict[str, SimulatedSetup]:
    """Points of GB300's curve by name, in the shape of Rubin's rack."""
    return {f"gb300-{lanes}": _gb300(_slice("gb300", lanes)) for lanes in GB300_LANES}


def gb300_recipe() -> dict[str, SimulatedSetup]:
    """Points of the published recipe for fast GB300s by name."""
    return {
        f"gb300-recipe-{lanes}": msgspec.structs.replace(
            _gb300(_slice("gb300", SLICE)),
            prefill_groups=1, prefill_ranks=4, decode_ranks=16, decode_width=16, concurrency=lanes, window_s=240.0, batch=4.0,
        )
        for lanes in RECIPE_LANES
    }  # fmt: skip


def three_pairs() -> dict[str, SimulatedSetup]:
    """Three prefill pairs under 4,800 sessions: pinned to their ranks, and with the pool."""
    pool = msgspec.structs.replace(
        _slice("vr", SLICE), prefill_groups=3, concurrency=4_800, decode_ranks=4, decode_width=32, settle_s=120.0
    )
    return {"three-pinned": _pinned(pool), "three-pool": pool}


def twelve_pairs() -> dict[str, SimulatedSetup]:
    """Twelve prefill pairs, sticky and by least uncached work; caches are large enough in both."""
    least = msgspec.structs.replace(
        _slice("vr", SLICE), prefill_groups=12, concurrency=7_000, decode_ranks=8, decode_width=32, settle_s=30.0, window_s=60.0
    )
    return {"twelve-sticky": _pinned(least), "twelve-least": least}


def _pinned(setup: SimulatedSetup) -> SimulatedSetup:
    return msgspec.structs.replace(setup, pool=False, policy="session_affinity", rank_cache_bytes=RUBIN_RANK_CACHE)


def all_setups() -> dict[str, SimulatedSetup]:
    """Every set-up that is simulated."""
    return three_pairs() | rubin_curve() | gb300_curve() | gb300_recipe() | twelve_pairs()


def at_step_times() -> dict[str, SimulatedSetup]:
    """The pairs again with all steps 5 % longer (`three-pool-slow`) and shorter (`-fast`)."""
    return {
        f"{name}-{kind}": msgspec.structs.replace(setup, prefill_time=factor, decode_time=factor)
        for name, setup in (three_pairs() | twelve_pairs()).items()
        for kind, factor in STEP_TIMES.items()
    }
