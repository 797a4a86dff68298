"""What the router can be told: wrong settings are refused with the name of the setting and the remedy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.base.ids import Rank
from rackserve.relay.config import Retries, RouteConfig, Waits, WorkerConfig, read_config, worker_from

URL = "http://127.0.0.1:1"


def test_a_worker_on_the_command_line_has_every_setting_of_one_in_a_file() -> None:
    worker = worker_from(f"{URL}/,role=prefill,dp_ranks=4,events=tcp://h:5,replay=tcp://h:6,capacity_tokens=9,bootstrap_port=7")
    assert worker == WorkerConfig(URL, "prefill", 4, "tcp://h:5", "tcp://h:6", 9, 7)
    assert worker.ranks == tuple(Rank("127.0.0.1:1", number) for number in range(4))
    assert (worker.name, worker.host) == ("127.0.0.1:1", "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:1", "expected an address"),
        ("ftp://h", "expected an address"),
        ("http://user@h", "expected an address"),
        ("http://h:99999", "expected an address"),
        ("http://h:x", "expected an address"),
        ("http://[::1", "expected an address"),
        (f"{URL},role=both", "role"),
        (f"{URL},ranks=2", "dp_ranks"),
        (f"{URL},dp_ranks", "name=value"),
        (f"{URL},dp_ranks=x", "dp_ranks"),
        (f"{URL},dp_ranks=0", "worker.dp_ranks"),
        (f"{URL},replay=tcp://h:1", "events"),
    ],
)
def test_a_worker_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        worker_from(text)


def workers(*roles: str) -> list[str]:
    return [f"http://127.0.0.1:{number},role={role}" for number, role in enumerate(roles, 1)]


@pytest.mark.parametrize(
    ("given", "changes", "said"),
    [
        ([], {}, "--worker"),
        (workers("prefill"), {}, "decode"),
        (workers("whole", "decode"), {}, "either"),
        (workers("whole", "prefill", "decode"), {}, "either"),
        ([URL, URL], {}, "twice"),
        ([f"{URL},events=tcp://h:1"], {}, "--tokenizer"),
        ([URL], {"port": 70_000}, "route.port"),
        ([URL], {"block_tokens": -1}, "route.block_tokens"),
        ([URL], {"pairs": "other"}, "pairs"),
        ([URL], {"unheard": 1}, "unheard"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: list[str], changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(None, given, changes)


@pytest.mark.parametrize("made", [lambda: Retries(attempts=0), lambda: Waits(head=0), lambda: Retries(budget=float("nan"))])
def test_limits_out_of_range_are_refused(made: object) -> None:
    with pytest.raises(ConfigError):
        made()  # type: ignore[operator]


def test_the_command_line_goes_over_the_file_and_adds_to_its_workers(tmp_path: Path) -> None:
    path = tmp_path / "route.yaml"
    path.write_text(
        "port: 9\nworkers:\n  - url: http://a:1\n    dp_ranks: 2\nwaits: {queue: 1}\nrouter: {policy: least_load}\n"
    )
    config = read_config(str(path), ["http://b:2"], {"port": 10, "host": None})
    assert [worker.name for worker in config.workers] == ["a:1", "b:2"]
    assert (config.port, config.host, config.waits.queue, config.router.policy) == (10, "127.0.0.1", 1, "least_load")


@pytest.mark.parametrize("text", ["- a", "port: [", "workers: 3", "!!python/object:os.system {}"])
def test_a_file_that_is_no_settings_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "route.yaml"
    path.write_text(text)
    with pytest.raises((FileFormatError, ConfigError)):
        read_config(str(path), [URL], {})


def test_keys_are_as_long_as_what_they_are_made_of_suggests() -> None:
    config = RouteConfig(workers=(WorkerConfig(URL),))
    assert config.key_tokens == 128
    assert msgspec.structs.replace(config, tokenizer="numbers").key_tokens == 16
    assert msgspec.structs.replace(config, block_tokens=7).key_tokens == 7
