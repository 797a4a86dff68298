"""Published measurements that need no file: set up on simulated racks and fleets, and run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rackserve.validation.pulls import document_trial, length_trials, prefix_trials
from rackserve.validation.routed import routed_trials
from rackserve.validation.rows import Trial
from rackserve.validation.shared_pool import pool_trials

PROCESSES = 2

SET_UPS: dict[str, Callable[[], list[Trial]]] = {
    "pool": pool_trials,
    "routing": routed_trials,
    "prefixes": prefix_trials,
    "lengths": length_trials,
    "documents": lambda: [document_trial()],
}
"""Sets of trials by name, the longest first."""


def run_set_ups(names: tuple[str, ...] = tuple(SET_UPS)) -> tuple[Trial, ...]:
    """All trials of `names`, two sets at a time, in their order."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return tuple(trial for trials in pool.map(run_set_up, names) for trial in trials)


def run_set_up(name: str) -> list[Trial]:
    """The trials of one set."""
    return SET_UPS[name]()
