from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.api.call import Caller
from rackserve.api.keys import KeyRing
from rackserve.cli import main


def test_a_printed_entry_lets_its_key_in_and_does_not_hold_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    entries = ""
    for options, caller in (
        (["ci"], Caller("", False, "ci")),
        (["ops", "--tenant", 'the "a" team', "--admin"], Caller('the "a" team', True, "ops")),
    ):
        assert main(["key", *options]) == 0
        out, err = capfd.readouterr()
        key, entries = err.split()[-1], entries + out
        assert key not in out
        path = tmp_path / "keys.toml"
        path.write_text(entries)
        assert KeyRing.open(str(path)).find(key) == caller


def test_the_help_does_not_promise_admin_routes(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["key", "--help"])
    assert "of which there is none yet" in " ".join(capfd.readouterr().out.split())


def test_no_two_keys_are_alike(capfd: pytest.CaptureFixture[str]) -> None:
    keys = set()
    for _ in range(3):
        assert main(["key", "ci"]) == 0
        keys.add(capfd.readouterr().err.split()[-1])
    assert len(keys) == 3 and min(map(len, keys)) > 40


@pytest.mark.parametrize("options", [["key", ""], ["key", "x" * 101], ["key", "x", "--tenant", "t" * 201]])
def test_a_name_no_key_file_takes_is_refused(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert "1 to 100" in capfd.readouterr().err


@pytest.mark.parametrize("options", [["key", "a\x7fb"], ["key", "\udcff"], ["key", "x", "--tenant", "a\nb"]])
def test_what_cannot_be_printed_is_in_no_key_file(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert "printable" in capfd.readouterr().err
