"""The suites, in the order in which they run. Each module has one or more, and what is special about running them."""

from __future__ import annotations

from conformance.cases import Suite
from conformance.suites import agents, comply, datasette, evaluation, libraries, load, vendors

SUITES: tuple[Suite, ...] = (
    *comply.SUITES,
    *vendors.SUITES,
    *agents.SUITES,
    *datasette.SUITES,
    *libraries.SUITES,
    *evaluation.SUITES,
    *load.SUITES,
)
