"""One device with the golden model for the tests of a file. A test that needs untouched memory poisons it."""

from __future__ import annotations

import pytest

from tests.model.deepseek_v41.golden import Bench


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()
