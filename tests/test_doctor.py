from __future__ import annotations

import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rackserve import doctor
from rackserve.api.keys import KEY_VARIABLE
from rackserve.base.errors import FileFormatError
from rackserve.base.topology import Topology
from rackserve.cli import main
from rackserve.config import SecurityConfig, ServerConfig, Settings
from rackserve.doctor import CHECKS, Finding, cpu_flags, examine
from rackserve.live.runner import RunnerSpec

SMALL = Settings(
    topology=Topology(prefill_blocks=64, decode_blocks=64, segment_blocks=16), runner=RunnerSpec(), server=ServerConfig(port=0)
)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def finding(what: str, settings: Settings = SMALL) -> Finding:
    return next(each for each in examine(settings) if each.what == what)


def test_a_machine_that_runs_these_tests_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--set", "runner.kind=digest", "--set", "server.port=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "`rackserve serve` can work here"
    assert [line[6:].split("  ")[0] for line in lines[:-1]] == list(CHECKS)


def test_what_is_bad_is_counted_and_gives_exit_code_4(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--set", "runner.kind=digest", "--set", f"server.port={port}"]) == 4
    out = capsys.readouterr().out
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in out
    assert out.endswith("1 to mend before `rackserve serve` can work\n")


@pytest.mark.parametrize(("room", "verdict"), [(10**12, "ok"), (152 * 2**20, "note"), (10**6, "bad")])
def test_memory_is_counted_for_the_whole_rack(room: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rackserve.live.regions", "rackserve.doctor"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda *_: room)
    found = finding("memory")
    assert found.verdict == verdict and ("lower topology.prefill_blocks" in found.text) is (verdict == "bad")


def test_a_server_that_others_reach_without_a_key_is_bad_and_noted_if_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    public = msgspec.structs.replace(SMALL, server=ServerConfig(host="0.0.0.0", port=0))
    found = finding("keys", public)
    assert found.verdict == "bad" and KEY_VARIABLE in found.text
    assert finding("keys", msgspec.structs.replace(public, security=SecurityConfig(keyless=True))).verdict == "note"
    monkeypatch.setenv(KEY_VARIABLE, "k")
    assert finding("keys", public).verdict == "ok"
    assert finding("keys").verdict == "ok"


@pytest.mark.parametrize(("most", "verdict"), [(128, "bad"), (512, "note"), (4096, "ok")])
def test_few_open_files_mean_few_clients(most: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits = {resource.RLIMIT_NOFILE: (64, most), resource.RLIMIT_NPROC: free, resource.RLIMIT_AS: free}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert doctor._limits(SMALL)[0] == verdict


@pytest.mark.parametrize(("kernels", "there", "verdict"), [
    ("auto", True, "ok"), ("auto", False, "note"), ("native", True, "ok"), ("native", False, "bad"), ("torch", True, "ok"),
    ("torch", False, "ok"),
])  # fmt: skip
def test_kernels_that_are_wanted_and_missing_are_told(
    kernels: Any, there: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rackserve.kernels.cpu.library.find", lambda: SimpleNamespace(path="avx512-vnni") if there else None)
    got = finding("kernels", msgspec.structs.replace(SMALL, runner=RunnerSpec(kind="llama", kernels=kernels)))
    assert got.verdict == verdict
    assert ("torch" in got.text) is (kernels == "torch" or not there)
    assert finding("kernels").text == "not needed by the toy model"


def test_what_serve_refuses_is_bad_and_more_threads_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackserve.kernels.cpu.library.find", lambda: SimpleNamespace(path="avx512-vnni"))
    monkeypatch.setattr(doctor, "allowed_cores", lambda: (0, 1))
    runner = RunnerSpec(kind="deepseek_v41", model="golden", block_tokens=32, kernels="native")
    spread = Settings(topology=Topology(prefill_ranks=2, decode_ranks=2), runner=runner)
    assert finding("kernels", spread).verdict == "bad"
    wide = msgspec.structs.replace(SMALL, runner=RunnerSpec(kind="llama", threads=3))
    got = finding("kernels", wide)
    assert got.verdict == "note" and "3 devices of 3 threads on 2 cores" in got.text


def test_a_port_that_a_rackserve_has_leads_to_looking_at_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "is_rackserve", lambda url: url == f"http://127.0.0.1:{port}")
        got = finding("port", msgspec.structs.replace(SMALL, server=ServerConfig(port=port)))
    assert got.verdict == "bad" and f"`rackserve doctor --url http://127.0.0.1:{port}` looks at it" in got.text


def test_a_model_that_cannot_be_read_is_bad_and_the_rest_is_looked_at_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileFormatError("/model: no config.json")

    monkeypatch.setattr(doctor, "describe_model", fail)
    found = list(examine(SMALL))
    assert [each.what for each in found if each.verdict == "bad"] == ["model"] and len(found) == len(CHECKS)


def test_a_toy_model_without_a_template_is_noted() -> None:
    assert finding("model").verdict == "note" and "context 1024" in finding("model").text


def test_features_are_those_of_the_first_cpu(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor : 1\nflags\t\t: fpu\n")
    assert cpu_flags(path) == {"fpu", "avx2", "amx_bf16"}
    assert cpu_flags(tmp_path / "nothing") == set()


def test_a_full_disk_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RACKSERVE_CACHE", str(tmp_path / "deep" / "cache"))
    assert doctor._disk(SMALL)[0] == "ok"
    monkeypatch.setattr(doctor, "DISK_BYTES", 1 << 60)
    assert doctor._disk(SMALL)[0] == "note"
