from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.cli import main
from rackserve.config import Settings, flatten, resolve
from rackserve.config_command import explain, meanings

NAMES = [name for name, _ in flatten(msgspec.to_builtins(Settings()))]


def test_show_tells_where_each_value_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("server:\n  port: 81\n  grace: 5\n  host: localhost\n")
    monkeypatch.setenv("RACKSERVE_SERVER__GRACE", "6")
    monkeypatch.setenv("RACKSERVE_SERVER__HOST", "127.0.0.1")
    assert main(["config", "show", "--origin", "--config", str(path), "--set", "server.host=::1"]) == 0
    told = {line.split(" = ")[0]: line.split(" = ")[1] for line in capsys.readouterr().out.splitlines()}
    assert list(told) == NAMES
    assert told["server.port"].split("#") == ["81".ljust(len(told["server.port"].split("#")[0])), f" file {path}:2"]
    assert told["server.grace"].endswith("# RACKSERVE_SERVER__GRACE") and told["server.grace"].startswith("6.0 ")
    assert told["server.host"].startswith('"::1"') and told["server.host"].endswith("# --set")
    assert told["seed"].endswith("# default")


def test_without_origins_the_output_is_what_a_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == Settings().as_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_be_explained(name: str) -> None:
    lines = explain(name, resolve(None, []))
    assert lines[0].startswith(f"{name} = ") and f"--set {name}=" in lines[-1]
    section, _, field = name.rpartition(".")
    assert any(line.startswith(name) for line in explain(section, resolve(None, []))) if section else field == "seed"


def test_an_explanation_has_meaning_default_and_origin() -> None:
    lines = explain("limits.body-s", resolve(None, ["limits.body_s=7"]))
    assert lines == [
        "limits.body_s = 7.0   # --set",
        "  seconds to wait for the next part of a body, or for the client to take a part of the answer",
        "  default: 30.0",
        "  set it with --set limits.body_s=VALUE, RACKSERVE_LIMITS__BODY_S=VALUE or a file given with --config",
    ]


def test_flags_of_other_servers_and_wrong_names_get_ours() -> None:
    assert "scheduler.max_sequences" in explain("max-num-seqs", resolve(None, []))[0]
    with pytest.raises(ConfigError, match=r"no setting server\.prot; did you mean server\.port\?"):
        explain("server.prot", resolve(None, []))


def test_a_meaning_goes_on_over_lines_and_holds_for_all_names_before_it() -> None:
    class Kind:
        """Something.

        a, b  first line
              and its second
        c     another

        Not about c.
        """

    Kind.__doc__ = "\n".join(line.removeprefix("    ") for line in (Kind.__doc__ or "").splitlines())
    both = "first line and its second"
    assert meanings(Kind) == {"a": both, "b": both, "c": "another"}


def test_explain_without_a_key_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain"]) == 2
    assert "needs a setting" in capsys.readouterr().err
