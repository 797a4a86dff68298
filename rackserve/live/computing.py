"""What the devices of a rack compute with: as it is to be expected before they start, and in words."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.topology import ROLES, Topology
from rackserve.live.cores import allowed_cores, share_cores
from rackserve.live.rank_spec import RankStatus
from rackserve.live.runner import RunnerSpec

SLOWER = "several times slower than AVX-512 VNNI kernels"


class Expected(msgspec.Struct, frozen=True):
    """kernels: an instruction set, "torch", or "digest", the toy model; reason: why not native ones, with the remedy."""

    kernels: str
    reason: str = ""


def expect(spec: RunnerSpec, topology: Topology) -> Expected:
    """What `spec` comes to on this machine. ConfigError where ranks would refuse to start.

    Shapes of a model that the kernels do not know show only when a rank opens it.
    """
    if spec.kind == "digest":
        return Expected("digest")
    if spec.kernels == "torch":
        return Expected("torch", "as runner.kernels says")
    if spec.kind == "deepseek_v41" and any(topology.group_size(role) > 1 for role in ROLES):
        if spec.kernels == "native":
            raise ConfigError("native kernels do not spread experts over ranks yet; set runner.kernels to torch")
        return Expected("torch", "as native kernels do not spread experts over ranks yet")
    from rackserve.kernels.cpu import library

    found = library.find()
    if found is not None:
        left = library.slower_for_llama() if (spec.kind, spec.kernels) == ("llama", "auto") else ""
        return Expected("torch", left) if left else Expected(found.path)
    if spec.kernels == "native":
        raise ConfigError(f"{library.missing()}, or set runner.kernels to torch")
    return Expected("torch", library.missing())


def in_words(kernels: str, threads: int, reason: str = "") -> str:
    """One line for people: what computes and how wide, or why slowly."""
    if kernels == "digest":
        return "computes nothing: the toy model"
    if kernels == "torch":
        return f"computes with torch, {SLOWER}: {reason or 'the native kernels do not know the shapes of this model'}"
    return f"computes with {kernels}, {threads} thread{'s' if threads > 1 else ''} a device"


def crowding(threads: int, num_devices: int, allowed: Sequence[int], setting: str = "runner.threads") -> str:
    """A warning if `threads` of each of `num_devices` are more than the cores that may be used; else "". 0: shared out."""
    each = share_cores(threads, 0, num_devices, allowed).threads
    if each == 1 or each * num_devices <= len(allowed):
        return ""
    best = max(1, len(allowed) // num_devices)
    return (
        f"{num_devices} device{'s' if num_devices > 1 else ''} of {each} threads on {len(allowed)} "
        f"core{'s' if len(allowed) > 1 else ''}: threads of a step wait for each other, which is many times slower; "
        f"set {setting} to {best}"
    )


def engine_lines(spec: RunnerSpec, topology: Topology, ranks: Sequence[RankStatus]) -> list[str]:
    """What computes, as `ranks` tell, once for each kind of engine; and whether there are too few cores for it."""
    found = sorted({(rank.kernels, rank.threads) for rank in ranks if rank.kernels})
    reason = expect(spec, topology).reason
    crowded = crowding(max((threads for _, threads in found), default=1), topology.num_devices, allowed_cores())
    return [in_words(kernels, threads, reason) for kernels, threads in found] + ([f"note: {crowded}"] if crowded else [])
