from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import choice
from rackserve.kernels.cpu.choice import NEEDED, SPELLINGS, VARIABLE, chosen, file_of


def built(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / file_of(name)).touch()
    return folder


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "features", lambda: NEEDED["avx2"])
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_best_of_those_that_are_there_and_run_here_is_chosen(tmp_path: Path) -> None:
    assert chosen(tmp_path) == ""
    assert chosen(built(tmp_path, "avx512")) == "", "this processor does not run it"
    assert chosen(built(tmp_path, "portable")) == "portable"
    assert chosen(built(tmp_path, "avx2")) == "avx2"


def test_what_is_asked_for_is_chosen_under_either_of_its_names_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path, "avx512", "avx2", "portable")
    monkeypatch.setattr(choice, "features", lambda: NEEDED["avx512"] | NEEDED["avx2"])
    for asked, wanted in [("portable", "portable"), ("none", ""), *SPELLINGS.items(), ("avx2", "avx2")]:
        monkeypatch.setenv(VARIABLE, asked)
        assert chosen(tmp_path) == wanted
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="RACKSERVE_KERNELS=sse9: not built, or not for this processor; one of avx512, avx2"):
        chosen(tmp_path)
