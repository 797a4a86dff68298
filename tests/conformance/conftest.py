"""A rack of the embedded model, as users start it, for suites and clients that nobody here wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.rig import command

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it answers, without /v1."""
    # Short contexts, so that a small model that does not know when to stop does not take minutes.
    options = ["--port", "0", "--set", "server.max_model_len=1500"]
    with command(tmp_path_factory.mktemp("rack"), "serve", *options, environment={"OMP_NUM_THREADS": "1"}) as running:
        yield running.said("serving ", 120.0).split(" on ")[1].split()[0]


@pytest.fixture(scope="session")
def model() -> str:
    """The name it serves."""
    return "smollm2-135m"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "model: needs torch and the embedded model")
