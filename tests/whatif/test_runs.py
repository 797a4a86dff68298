from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackserve.base.errors import FileFormatError
from rackserve.simulated_rack import SimulatedSetup
from rackserve.whatif import runs
from rackserve.whatif.runs import ResultRow, Workload, read_rows, run_all, run_setup, seeds_of, workload_of
from tests.whatif.small import SETUP, WORKLOAD


@pytest.fixture(scope="module")
def made() -> dict[int, ResultRow]:
    return {setup.seed: run_setup(setup, WORKLOAD) for setup in seeds_of(SETUP, 2)}


def test_samples_of_sessions_add_up_to_the_figures(made: dict[int, ResultRow]) -> None:
    for row in made.values():
        figures = row.figures
        assert figures is not None
        samples = row.sessions.values()
        assert sum(sample.num_requests for sample in samples) == figures.num_requests > 5
        tokens = sum(sample.cached + sample.uncached + sample.output for sample in samples)
        assert tokens / SETUP.window_s / SETUP.num_gpus == pytest.approx(figures.total_per_gpu)
        assert sum(sample.uncached for sample in samples) / figures.num_requests == pytest.approx(figures.uncached_per_request)
    assert made[42].figures != made[43].figures, "another seed draws other sessions"


def test_results_are_kept_and_not_run_again(
    tmp_path: Path, made: dict[int, ResultRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def fake(setup: SimulatedSetup, workload: Workload) -> ResultRow:
        ran.append(setup.seed)
        if setup.seed == 44:
            raise KeyboardInterrupt
        return msgspec.structs.replace(made[42], setup=setup)

    monkeypatch.setattr(runs, "run_setup", fake)
    path = tmp_path / "results.jsonl"
    seen: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        run_all(seeds_of(SETUP, 3), WORKLOAD, 1, path, lambda row, done, total: seen.append((done, total)))
    assert ran == [42, 43, 44] and seen == [(1, 3), (2, 3)] and len(read_rows(path)) == 2
    found = run_all(seeds_of(SETUP, 2), WORKLOAD, 1, path)
    assert ran == [42, 43, 44] and list(found) == seeds_of(SETUP, 2)
    path.write_bytes(path.read_bytes()[:-40])
    run_all(seeds_of(SETUP, 2), WORKLOAD, 1, path)
    assert ran[3:] == [43], "a line that was cut off is run again"
    run_all(seeds_of(SETUP, 1), Workload(5), 1, path)
    assert ran[4:] == [42], "so is what had other sessions"
    assert len(read_rows(path)) == 3


def test_processes_give_what_one_gives(made: dict[int, ResultRow], tmp_path: Path) -> None:
    found = run_all(seeds_of(SETUP, 2), WORKLOAD, 2, tmp_path / "x")
    assert [row.figures for row in found.values()] == [made[42].figures, made[43].figures]
    assert {row.setup.seed: row for row in read_rows(tmp_path / "x")} == made


def test_a_set_up_that_cannot_run_says_why_and_does_not_end_the_others() -> None:
    small = msgspec.structs.replace(SETUP, pool=False, policy="session_affinity", rank_cache_bytes=1e6)
    found = run_all([small], WORKLOAD, 1)
    assert found[small].figures is None and found[small].error


def test_a_damaged_file_and_a_missing_trace_are_named(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("{}\n{}\n")
    with pytest.raises(FileFormatError, match=r"r:1: .*move the file away"):
        read_rows(tmp_path / "r")
    with pytest.raises(FileFormatError, match="cannot be read"):
        workload_of(3, str(tmp_path / "nothing"))
    assert workload_of(3, None).describe() == "3 drawn sessions"
