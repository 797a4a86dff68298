from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.rig import digest_options, hex_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tokenizer that spells tokens in hexadecimal."""
    return hex_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def digest(tokenizer: Path) -> list[str]:
    """Options for a rack on the digest model."""
    return digest_options(tokenizer)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "model: needs torch and the embedded model")
