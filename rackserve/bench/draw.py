"""The draw that decides where a replayed session starts, bit for bit as the published benchmark makes it.

That benchmark seeds NumPy's default generator (PCG64) and takes one number from it. Only this is needed, so it is written out
here instead of making NumPy a dependency of the client.
"""

from __future__ import annotations

from hashlib import sha256

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1
_MASK_128 = (1 << 128) - 1
_POOL = 4
_MULTIPLIER = 47026247687942121848144207491837523525  # PCG's 128-bit multiplier


def start_share(seed: int, session: str, lane: int) -> float:
    """A number in [0, 1) for lane `lane` that starts in `session`: the first draw of a generator seeded by all three."""
    digest = sha256(f"{seed}:{session}:{lane}".encode()).digest()
    return first_unit(int.from_bytes(digest[:8], "big"))


def first_unit(seed: int) -> float:
    """What `numpy.random.default_rng(seed).random()` returns first, for `seed` from 0 to 2**64 - 1."""
    first, second, third, fourth = _seed_words(seed)
    increment = ((third << 64 | fourth) << 1 | 1) & _MASK_128
    state = (increment + (first << 64 | second)) & _MASK_128  # one step from 0, then the seed added
    state = (state * _MULTIPLIER + increment) & _MASK_128
    state = (state * _MULTIPLIER + increment) & _MASK_128  # the step before every output
    mixed = (state >> 64) ^ (state & _MASK_64)
    turn = state >> 122
    output = (mixed >> turn | mixed << (64 - turn)) & _MASK_64
    return float((output >> 11) / (1 << 53))


class _Hash:
    """A multiplicative hash whose constant moves on with every use."""

    __slots__ = ("_constant", "_factor")

    def __init__(self, constant: int, factor: int) -> None:
        self._constant = constant
        self._factor = factor

    def __call__(self, value: int) -> int:
        value ^= self._constant
        self._constant = self._constant * self._factor & _MASK_32
        value = value * self._constant & _MASK_32
        return value ^ value >> 16


def _mix(left: int, right: int) -> int:
    mixed = (left * 0xCA01F9DD - right * 0x4973F715) & _MASK_32
    return mixed ^ mixed >> 16


def _seed_words(seed: int) -> list[int]:
    """Four 64-bit words spread from `seed` (NumPy's SeedSequence)."""
    words = [seed & _MASK_32, seed >> 32, 0, 0]
    hashed = _Hash(0x43B0D7E5, 0x931E8875)
    pool = [hashed(word) for word in words]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], hashed(pool[source]))
    spread = _Hash(0x8B51F9DD, 0x58F38DED)
    halves = [spread(pool[number % _POOL]) for number in range(2 * _POOL)]
    return [halves[2 * number] | halves[2 * number + 1] << 32 for number in range(_POOL)]
