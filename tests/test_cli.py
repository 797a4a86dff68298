from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rackserve import __version__, benchmark, cli, commands, demo
from rackserve.base.errors import ConfigError, FileFormatError, InvariantError, RackserveError, ResourceError
from rackserve.cli import COMMANDS, main, parser

DIGEST = ["--set", "runner.kind=digest"]


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on standard error of a command that must fail."""
    code = main(arguments)
    errors = capsys.readouterr().err
    assert errors.startswith("rackserve: ") and errors.count("\n") == 1, errors
    return code, errors.removeprefix("rackserve: ").rstrip()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("router.polcy=least_load", "unknown setting router.polcy; section router has: fetch_cost, max_index_runs"),
        ("routr.policy=least_load", "unknown setting routr; settings has: deadlines, frontend, limits"),
        ("router.policy=fastest", "router.policy 'fastest' is unknown; choose one of"),
        ("router", "--set router: expected section.key=value"),
        ("=3", "--set =3: expected section.key=value"),
        ("router=3", "router: expected a section with keys, got 3"),
        ("server.port=http", "setting server.port: Expected `int`, got `str`"),
        ("server.port=70000", "server.port must be between 0 and 65535, got 70000"),
        ("server.host=[", "--set server.host=[: the value is not YAML"),
        ("topology.prefill_workers=0", "topology.prefill_workers must be at least 1, got 0"),
    ],
)
def test_a_wrong_setting_is_named_with_exit_code_2(override: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = failing(capsys, "simulate", "--set", override)
    assert code == 2 and error.startswith(says)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("--time-scale", text) for text in ("0", "-1", "nan", "inf", "1e-300", "1e300")),
        *(("--deadline", text) for text in ("-1", "nan", "inf", "1e300")),
    ],
)
def test_a_number_that_is_none_or_too_large_is_refused_by_name(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "--url", "x", f"{option}={text}"])
    assert end.value.code == 2
    assert f"error: argument {option}: must be from " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.toml", None, "cannot be read"),
        ("broken.toml", b"router = [", "not TOML"),
        ("broken.yaml", b"router: [", "not YAML"),
        ("list.yaml", b"- 1\n", "expected sections with keys, got list"),
        ("binary.toml", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_settings_file_that_is_none_is_named_with_exit_code_3(
    name: str, content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    code, error = failing(capsys, "simulate", "--config", str(path))
    assert code == 3 and error.startswith(f"{path}: ") and says in error


def test_a_malformed_trace_line_is_named_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = b'{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": []}\n'
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(good + b'{"id": 7}\n')
    code, error = failing(capsys, "simulate", "--trace", str(trace), *DIGEST)
    assert code == 3 and error.startswith(f"{trace}:2: ")
    missing = tmp_path / "nothing.jsonl"
    code, error = failing(capsys, "simulate", "--trace", str(missing), *DIGEST)
    assert code == 3 and error.startswith(f"{missing}: cannot be read")


def test_a_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = failing(capsys, "bench", "--url", "http://127.0.0.1:9", "--limit", "1")
    assert code == 2 and error.startswith("--url http://127.0.0.1:9: ") and "is the server running?" in error
    code, error = failing(capsys, "bench", "--url", "127.0.0.1:9", "--limit", "1")
    assert code == 2 and error.startswith("--url 127.0.0.1:9: ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["serve", "--port", "http"],
        ["bench"],
        ["bench", "--url", "http://x", "--gpus", "0"],
        ["bench", "--url", "http://x", "--concurrency", "1,0"],
        ["bench", "--url", "http://x", "--concurrency", "1,2,2"],
        ["bench", "--url", "http://x", "--concurrency", "1,,2"],
        ["bench", "--url", "http://x", "--header", "nothing"],
        ["synthesize", "--sessions", "0"],
        ["simulate", "--concurrency", "0"],
        ["simulate", "--limit", "-1"],
        ["simulate", "--scale", "half"],
        ["swarm", "--seeds", "0"],
    ],
)
def test_a_wrong_option_shows_the_usage_with_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: rackserve") and "error: " in errors.splitlines()[-1]


def test_a_wrong_variable_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RACKSERVE_SERVER__PORT", "high")
    for command in ("serve", "simulate"):
        code, error = failing(capsys, command, *DIGEST)
        assert code == 2 and error == "setting server.port: Expected `int`, got `str` (RACKSERVE_SERVER__PORT)"


def test_each_kind_of_failure_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failures: dict[type[BaseException], int] = {
        RackserveError: 1,
        ConfigError: 2,
        FileFormatError: 3,
        ResourceError: 4,
        InvariantError: 70,
        KeyboardInterrupt: 130,
    }
    for kind, code in failures.items():

        def fail(options: argparse.Namespace, kind: type[BaseException] = kind) -> int:
            raise kind("what happened")

        monkeypatch.setattr(commands, "swarm", fail)
        says = "interrupted" if kind is KeyboardInterrupt else "what happened"
        assert failing(capsys, "swarm") == (code, says)


def test_an_interrupt_while_a_command_is_being_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert failing(capsys, "swarm") == (130, "interrupted")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(commands, "swarm", fail)
    with pytest.raises(ZeroDivisionError):
        main(["swarm"])


def test_the_code_of_the_command_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve", "demo", "bench", "simulate", "synthesize", "swarm"):
        module = {"demo": demo, "bench": benchmark, "synthesize": benchmark}.get(name, commands)
        function = "run_demo" if name == "demo" else name
        monkeypatch.setattr(module, function, lambda options, name=name: 11 if options.command == name else 1)
        assert main([name, *(["--url", "x"] if name == "bench" else [])]) == 11


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"rackserve {__version__}\n"


def test_every_option_says_what_it_does() -> None:
    (commands_action,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert list(commands_action.choices) == list(COMMANDS)
    for name, command in commands_action.choices.items():
        options = command.load()._actions
        assert len(options) > 1 and all(action.help for action in options), name


def test_the_help_fits_a_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == list(COMMANDS)


def test_help_loads_no_command() -> None:
    script = "import sys; from rackserve.cli import parser; parser().format_help(); print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert not {"msgspec", "starlette", "asyncio", "httpx", "yaml", "rackserve.config"} & set(loaded)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["srve"], "unknown command srve; did you mean serve?"),
        (["xyzzy"], "unknown command xyzzy; `rackserve --help` lists all"),
        (["serve", "--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["serve", "--max-num-seqs=8"], "unknown option --max-num-seqs; here it is --set scheduler.max_sequences=N"),
        (["swarm", "--max-num-seqs=8"], "unknown option --max-num-seqs"),
        (["plan-memory", "--engram_shards", "1"], "unknown option --engram_shards; did you mean --engram-shards?"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_one(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.startswith("usage: rackserve") and errors.splitlines()[-1].endswith(f"error: {says}")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "rackserve", "swarm", "--seed", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGPIPE and errors == b""
