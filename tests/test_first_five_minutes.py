"""What the script that runs the README's first five minutes (in `make test`, beside these) takes for a success and what not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "first_five_minutes.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_five_minutes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


five = _load()
README: str = five.README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (five.HEADING, "## Serve", "no commands under"),
        ("rackserve compare runs/vr", "rackserve contrast runs/vr", "0 steps check this block"),
        ("```\nsmall=", "```\nkill -9 1\nsmall=", "2 steps check this block"),
        ("rackserve bench --url", "rackserve compare --url", "steps are"),
    ],
)
def test_a_readme_whose_commands_nobody_checks_is_refused(old: str, new: str, says: str) -> None:
    assert README.count(old) >= 1
    with pytest.raises(five.Failed, match=says):
        five.match(five.blocks(README.replace(old, new)), (five.SERVE, *five.STEPS))


def stream(*usages: str, finish: str = "length") -> str:
    end = f'data: {{"choices": [{{"finish_reason": "{finish}"}}]}}\n'
    return end + "".join(f"data: {usage}\n" for usage in usages) + "data: [DONE]\n"


@pytest.mark.parametrize(
    "output",
    [
        "",
        "data: {}\n",
        stream('{"choices": [], "usage": {"completion_tokens": 12, "attempts": 2}}'),
        stream('{"choices": [], "usage": {"completion_tokens": 400, "attempts": 1}}'),
        stream('{"choices": [], "usage": {"completion_tokens": 400, "attempts": 2}}', finish="stop"),
    ],
)
def test_an_answer_that_was_cut_or_never_lost_its_rank_is_no_proof(output: str, tmp_path: Path) -> None:
    with pytest.raises(five.Failed):
        five.killed(output, tmp_path)


def test_a_command_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(five.Failed, match="exit code 3") as caught:
        five.run("echo $((6 * 7)); echo $((6 * 8)) >&2; (exit 3); echo $((6 * 9))", "", tmp_path)
    said = str(caught.value)
    assert "42" in said and "48" in said and "54" not in said
