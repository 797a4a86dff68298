"""A worker without its two extra ports cannot be built."""

from __future__ import annotations

import pytest

from rackserve.assemble import RackConfig, build_worker
from rackserve.base.errors import InvariantError
from rackserve.digest_model import digest_layout
from tests.nodes.clock import Notes


def test_a_worker_needs_an_engine_and_a_store() -> None:
    with pytest.raises(InvariantError, match="engine and a store"):
        build_worker(RackConfig(), "prefill0", "prefill", digest_layout(4), Notes().ports(), 1)
