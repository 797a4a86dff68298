"""Agents are stubs that print what they got: the wiring is theirs to read, the rest is ours."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rackserve.api.keys import KEY_VARIABLE
from rackserve.base.errors import ConfigError, ResourceError
from rackserve.cli import main
from rackserve.launch import AGENTS, NO_KEY, find_target, private_folder

STUB = """#!{python}
import json, os, sys, time, pathlib
names = ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "PI_CODING_AGENT_DIR", "LLM_USER_PATH", "QWEN_HOME")
folders = [os.environ[n] for n in names if n in os.environ]
folders += [os.path.dirname(os.environ["OPENCODE_CONFIG"])] if "OPENCODE_CONFIG" in os.environ else []
files = {{p.name: p.read_text() for f in folders for p in pathlib.Path(f).iterdir()}}
modes = [oct(os.stat(f).st_mode & 0o777) for f in folders]
told = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files, "modes": modes, "folders": folders}}
pathlib.Path(os.environ["STUB_OUT"]).write_text(json.dumps(told))
for f in folders:
    pathlib.Path(f, "left by the agent").write_text("x")
for variable, usual in {places!r}[pathlib.Path(sys.argv[0]).name].items():
    place = pathlib.Path(os.environ.get(variable) or pathlib.Path.home() / usual)
    place.mkdir(parents=True, exist_ok=True)
    (place / "settings").write_text("overwritten")
if "sleep" in sys.argv:
    time.sleep(30)
sys.exit(7)
"""


PLACES = {
    "codex": {"CODEX_HOME": ".codex"},
    "opencode": {"XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": ".local/share", "XDG_STATE_HOME": ".local/state"},
    "qwen": {"QWEN_HOME": ".qwen"},
    "claude": {"CLAUDE_CONFIG_DIR": ".claude"},
    "pi": {"PI_CODING_AGENT_DIR": ".pi/agent"},
    "llm": {"LLM_USER_PATH": ".config/io.datasette.llm"},
}
"""Where each agent keeps what it writes: the variable that says so, and the place in the user's folder without it."""


class Models(BaseHTTPRequestHandler):
    key = ""

    def do_GET(self) -> None:
        good = not self.key or self.headers.get("authorization") == f"Bearer {self.key}"
        body = {"data": [{"id": "small", "max_model_len": 4096}, {"id": "large", "max_model_len": 142_000}]} if good else {}
        raw = json.dumps(body).encode()
        self.send_response(200 if good else 401)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in (KEY_VARIABLE, "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stubs of all agents first on the path; the file to which they write."""
    folder, out = tmp_path / "bin", tmp_path / "told.json"
    folder.mkdir()
    for agent in AGENTS.values():
        path = folder / agent.command
        path.write_text(STUB.format(python=sys.executable, places=PLACES))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_OUT", str(out))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RACKSERVE_CACHE", str(tmp_path / "cache"))
    for variable in {name for places in PLACES.values() for name in places}:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return out


def told(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(out.read_text())
    return read


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_gets_its_arguments_and_leaves_nothing_behind(agent: str, url: str, agents: Path) -> None:
    assert main(["launch", agent, "--url", url, "--", "exec", "--url", "say hi"]) == 7
    got = told(agents)
    assert got["arguments"][-3:] == ["exec", "--url", "say hi"]
    assert set(got["modes"]) <= {"0o700"} and not any(Path(folder).exists() for folder in got["folders"])
    assert list((agents.parent / "tmp").iterdir()) == []
    assert list((agents.parent / "cache" / "launch").iterdir()) == []
    everything = json.dumps([got["files"], got["environment"], got["arguments"]])
    assert url in everything and "small" in everything and NO_KEY in everything


@pytest.mark.parametrize("agent", AGENTS)
def test_what_the_user_s_own_agent_has_is_neither_read_nor_touched(agent: str, url: str, agents: Path) -> None:
    home = agents.parent / "home"
    for place in PLACES[agent].values():
        (home / place).mkdir(parents=True)
        (home / place / "settings").write_text("mine")
    main(["launch", agent, "--url", url])
    assert told(agents)["environment"]["HOME"] == str(home)
    assert {path.name: path.read_text() for path in home.rglob("*") if path.is_file()} == {"settings": "mine"}


@pytest.mark.parametrize("agent", AGENTS)
def test_a_key_goes_through_the_environment_alone(agent: str, url: str, agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Models, "key", "rk-secret")
    monkeypatch.setenv(KEY_VARIABLE, "rk-secret")
    main(["launch", agent, "--url", url, "--model", "large"])
    got = told(agents)
    assert "rk-secret" not in json.dumps([got["files"], got["arguments"]])
    assert got["environment"][KEY_VARIABLE] == "rk-secret"
    assert "large" in json.dumps([got["files"], got["arguments"], got["environment"]])


def wired(agent: str, url: str, out: Path) -> dict[str, Any]:
    main(["launch", agent, "--url", f"{url}/v1/", "--model", "large"])
    return told(out)


def test_codex_speaks_responses(url: str, agents: Path) -> None:
    settings = tomllib.loads(wired("codex", url, agents)["files"]["config.toml"])
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider == {"name": "rackserve", "base_url": f"{url}/v1", "wire_api": "responses"}
    assert (settings["model"], settings["model_context_window"]) == ("large", 142_000)


def test_opencode_has_the_model_as_both_of_its_models(url: str, agents: Path) -> None:
    settings = json.loads(wired("opencode", url, agents)["files"]["opencode.json"])
    assert settings["model"] == settings["small_model"] == "rackserve/large"
    assert settings["provider"]["rackserve"]["options"]["baseURL"] == f"{url}/v1"
    assert settings["provider"]["rackserve"]["models"]["large"]["limit"] == {"context": 142_000, "output": 8192}


def test_claude_speaks_messages_with_no_other_key(url: str, agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of somebody else")
    environment = wired("claude", url, agents)["environment"]
    assert environment["ANTHROPIC_BASE_URL"] == url and "ANTHROPIC_API_KEY" not in environment
    assert {environment[name] for name in environment if name.endswith("_MODEL") and name.startswith("ANTHROPIC")} == {"large"}


def test_qwen_pi_and_llm_are_given_url_and_model(url: str, agents: Path) -> None:
    qwen = wired("qwen", url, agents)
    assert qwen["environment"]["OPENAI_BASE_URL"] == f"{url}/v1" and qwen["arguments"][-2:] == ["--model", "large"]
    pi = wired("pi", url, agents)
    provider = json.loads(pi["files"]["models.json"])["providers"]["rackserve"]
    assert provider["baseUrl"] == f"{url}/v1" and provider["models"][0]["contextWindow"] == 142_000
    assert provider["models"][0]["compat"] == {"sendSessionAffinityHeaders": True}
    assert provider["apiKey"] == KEY_VARIABLE and pi["arguments"] == ["--provider", "rackserve", "--model", "large"]
    llm = wired("llm", url, agents)
    (entry,) = yaml.safe_load(llm["files"]["extra-openai-models.yaml"])
    assert (entry["model_id"], entry["api_base"]) == ("large", f"{url}/v1") and llm["files"]["default_model.txt"] == "large"
    assert entry["supports_tools"] is entry["supports_schema"] is True


def test_a_launch_has_the_place_of_the_one_before_so_that_its_prompts_are_known(url: str, agents: Path) -> None:
    assert wired("qwen", url, agents)["folders"] == wired("qwen", url, agents)["folders"]
    assert wired("qwen", url, agents)["folders"] != wired("codex", url, agents)["folders"]


def test_launches_at_the_same_time_have_places_of_their_own_and_what_a_killed_one_left_is_gone(agents: Path) -> None:
    with private_folder("qwen") as first, private_folder("qwen") as second:
        (first / "sub").mkdir()
        (first / "mine").write_text("1")
        assert first != second and not list(second.iterdir())
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in (first, second, first.parent)} == {0o700}
    first.mkdir(mode=0o755)
    (first / "sub").mkdir()
    (first / "left").write_text("by one that was killed")
    with private_folder("qwen") as third:
        assert third == first and not list(third.iterdir()) and stat.S_IMODE(third.stat().st_mode) == 0o700
    assert not third.exists()


def test_a_place_that_is_a_link_or_cannot_be_made_is_not_used(agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_folder("pi") as folder:
        parent = folder.parent
    (agents.parent / "elsewhere").mkdir()
    (parent / "pi").symlink_to(agents.parent / "elsewhere")
    with pytest.raises(ResourceError, match="RACKSERVE_CACHE may name"), private_folder("pi"):
        raise AssertionError("a folder was given")
    (agents.parent / "file").write_text("")
    monkeypatch.setenv("RACKSERVE_CACHE", str(agents.parent / "file"))
    with (
        pytest.raises(ResourceError, match=r"file/launch cannot be used \(Not a directory\); RACKSERVE_CACHE"),
        private_folder("pi"),
    ):
        raise AssertionError("a folder was given")


def test_an_agent_that_is_not_there_is_named_with_the_way_to_get_it(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["launch", "codex", "--url", url]) == 4
    assert capsys.readouterr().err == "rackserve: codex is not installed; get it with `npm install -g @openai/codex`\n"


def test_a_server_that_is_not_there_has_another_model_or_asks_for_a_key_is_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_target(url, None, "").model == "small"
    with pytest.raises(ConfigError, match=r"no model huge; it has: small, large"):
        find_target(url, "huge", "")
    with pytest.raises(ConfigError, match="is the server running"):
        find_target("http://127.0.0.1:9", None, "")
    monkeypatch.setattr(Models, "key", "k")
    with pytest.raises(ConfigError, match=f"asks for a key; put it into {KEY_VARIABLE}"):
        find_target(url, None, "")
    with pytest.raises(ConfigError, match="does not know this one"):
        find_target(url, None, "wrong")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)])
def test_a_signal_ends_the_agent_and_the_folder_goes(number: int, code: int, url: str, agents: Path) -> None:
    command = [sys.executable, "-m", "rackserve", "launch", "codex", "--url", url, "--", "sleep"]
    process = subprocess.Popen(command)
    end = time.monotonic() + 20
    while not (agents.exists() and agents.read_text().endswith("}")) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(10) == code
    assert not any(Path(folder).exists() for folder in told(agents)["folders"])
