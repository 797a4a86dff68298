from __future__ import annotations

from types import SimpleNamespace

import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.topology import Topology
from rackserve.kernels.cpu import library
from rackserve.live import computing
from rackserve.live.computing import Expected, crowding, engine_lines, expect, in_words
from rackserve.live.rank_spec import RankStatus
from rackserve.live.runner import RunnerSpec

ONE, SPREAD = Topology(), Topology(prefill_ranks=2, decode_ranks=2)
AVX2, AVX512 = SimpleNamespace(path="avx2"), SimpleNamespace(path="avx512-vnni")
SLOWER = "for Llama avx2 kernels are slower still; runner.kernels=native takes them all the same"


@pytest.mark.parametrize(
    ("kind", "kernels", "topology", "there", "wanted"),
    [
        ("llama", "auto", ONE, AVX512, Expected("avx512-vnni")),
        ("llama", "auto", ONE, AVX2, Expected("torch", SLOWER)),
        ("llama", "native", ONE, AVX2, Expected("avx2")),
        ("llama", "auto", ONE, None, Expected("torch", "none are here")),
        ("llama", "torch", ONE, AVX2, Expected("torch", "as runner.kernels says")),
        ("deepseek_v41", "auto", ONE, AVX2, Expected("avx2")),
        ("deepseek_v41", "auto", SPREAD, AVX2, Expected("torch", "as native kernels do not spread experts over ranks yet")),
        ("digest", "auto", ONE, None, Expected("digest")),
        ("llama", "native", ONE, None, "none are here, or set runner.kernels to torch"),
        ("deepseek_v41", "native", SPREAD, AVX2, "native kernels do not spread experts"),
    ],
)
def test_what_will_compute_is_what_ranks_come_to_and_refusals_are_theirs(
    kind: str, kernels: str, topology: Topology, there: object, wanted: Expected | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find", lambda: there)
    monkeypatch.setattr(library, "missing", lambda: "none are here")
    spec = RunnerSpec(kind=kind, kernels=kernels)  # type: ignore[arg-type]
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            expect(spec, topology)
    else:
        assert expect(spec, topology) == wanted


def test_the_line_says_how_wide_or_why_slowly() -> None:
    assert in_words("avx512-vnni", 1) == "computes with avx512-vnni, 1 thread a device"
    assert in_words("avx2", 4) == "computes with avx2, 4 threads a device"
    assert (
        in_words("torch", 1, "no compiler")
        == "computes with torch, several times slower than AVX-512 VNNI kernels: no compiler"
    )
    assert "do not know the shapes" in in_words("torch", 1)


@pytest.mark.parametrize(
    ("threads", "devices", "cores", "best"),
    [(0, 3, 2, 0), (1, 9, 2, 0), (2, 1, 2, 0), (3, 1, 2, 2), (2, 3, 2, 1), (4, 2, 7, 3), (0, 2, 9, 0)],
)
def test_threads_are_too_many_where_those_of_all_devices_exceed_the_cores(
    threads: int, devices: int, cores: int, best: int
) -> None:
    told = crowding(threads, devices, tuple(range(cores)))
    assert told == "" if not best else told.endswith(f"which is many times slower; set runner.threads to {best}")


def test_a_start_tells_each_kind_of_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(kernels: str, threads: int) -> RankStatus:
        return RankStatus("w", "decode", "up", 1, 1, 0, 0.0, -1.0, 0, kernels=kernels, threads=threads)

    monkeypatch.setattr(library, "find", lambda: AVX2)
    monkeypatch.setattr(computing, "allowed_cores", lambda: (0, 1))
    alike = [rank("avx2", 1), rank("avx2", 1), rank("avx2", 1)]
    assert engine_lines(RunnerSpec(kind="llama"), ONE, alike) == ["computes with avx2, 1 thread a device"]
    lines = engine_lines(RunnerSpec(kind="llama", threads=3), ONE, [rank("avx2", 3)])
    assert lines[0] == "computes with avx2, 3 threads a device" and lines[1].startswith(
        "note: 3 devices of 3 threads on 2 cores"
    )
    assert engine_lines(RunnerSpec(kind="llama"), ONE, []) == []
