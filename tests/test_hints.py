from __future__ import annotations

import re

import msgspec
import pytest

from rackserve.config import Settings, load_settings
from rackserve.hints import ELSEWHERE, hint_for_command, hint_for_flag, hint_for_setting, nearest

KNOWN = ["-h", "--help", "--port", "--host", "--set", "--tolerance"]


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--prt", "; did you mean --port?"),
        ("--Host", "; did you mean --host?"),
        ("--api-key", "; here it is the environment variable RACKSERVE_API_KEY, or --set security.key_file=FILE"),
        ("--max_model_len", "; here it is --set server.max_model_len=N"),
        ("--zebra", ""),
    ],
)
def test_a_flag_gets_the_nearest_of_ours_or_ours_for_it(flag: str, hint: str) -> None:
    assert hint_for_flag(flag, KNOWN) == hint


def test_a_command_without_settings_does_not_send_to_them() -> None:
    assert hint_for_flag("--max-model-len", ["--port"]) == ""


def test_every_setting_that_a_hint_names_takes_what_it_says() -> None:
    tree = msgspec.to_builtins(Settings())
    for text in ELSEWHERE.values():
        for name, value in re.findall(r"--set ([\w.]+)=(\w+)", text):
            section, _, key = name.partition(".")
            assert section in tree and (not key or key in tree[section]), name
            if value.islower() and section != "security":
                load_settings(None, [f"{name}={value}"])


def test_the_nearest_is_none_where_nothing_is_near() -> None:
    assert nearest("serv", ["serve", "sim"]) == "serve" and nearest("zzz", ["serve"]) == ""
    assert hint_for_command("swrm", ["swarm"]) == "; did you mean swarm?"


def test_a_key_in_the_wrong_section_is_found_by_its_end() -> None:
    known = ["server.port", "topology.pool", "scheduler.max_sequences", "a.x", "b.x"]
    assert hint_for_setting("topology.max_sequences", known) == "; did you mean scheduler.max_sequences?"
    assert hint_for_setting("server.prot", known) == "; did you mean server.port?"
    assert hint_for_setting("scheduler.max-sequences", known) == "; did you mean scheduler.max_sequences?"
    assert hint_for_setting("q.zzz", known) == ""
