"""Who may be chosen."""

from __future__ import annotations

from rackserve.base.ids import Rank
from rackserve.relay.config import RouteConfig, WorkerConfig
from rackserve.relay.workers import Fleet


def fleet(*dp_ranks: int) -> Fleet:
    made = Fleet(RouteConfig(workers=tuple(WorkerConfig(f"http://w{at}", dp_ranks=size) for at, size in enumerate(dp_ranks))))
    for worker in made.workers:
        worker.up = True
    return made


def test_all_ranks_of_workers_that_are_up_come_in_order() -> None:
    made = fleet(2, 1, 3)
    made.workers[1].up = False
    assert made.ranks("whole", "m", 0.0) == [Rank("w0", 0), Rank("w0", 1), Rank("w2", 0), Rank("w2", 1), Rank("w2", 2)]
    assert made.ranks("whole", "m", 0.0, dp_rank=2) == [Rank("w2", 2)]
    assert made.ranks("decode", "m", 0.0) == []


def test_a_worker_that_was_tried_is_taken_only_if_there_is_no_other() -> None:
    made = fleet(1, 1)
    assert made.ranks("whole", "m", 0.0, without=["w0"]) == [Rank("w1")]
    assert made.ranks("whole", "m", 0.0, without=["w0", "w1"]) == [Rank("w0"), Rank("w1")]


def test_an_open_circuit_and_another_model_rule_a_worker_out() -> None:
    made = fleet(1, 1, 1)
    for _ in range(5):
        made.workers[0].breaker.failed(1.0)
    made.workers[1].models = {"other": 0}
    assert made.ranks("whole", "m", 1.0) == [Rank("w2")]
    assert made.knows("m")
    made.workers[0].models = made.workers[2].models = {"other": 4096}
    assert not made.knows("m")
    assert made.models() == {"other": 4096}


def test_a_request_that_enters_takes_the_one_try_of_a_half_open_circuit() -> None:
    made = fleet(1)
    worker = made.workers[0]
    for _ in range(5):
        worker.breaker.failed(1.0)
    assert made.ranks("whole", "m", 100.0) == [Rank("w0")]
    worker.enter()
    assert made.ranks("whole", "m", 100.0) == []
    worker.leave()
    assert made.ranks("whole", "m", 100.0) == [Rank("w0")]
    assert worker.in_flight == 0
