"""Mistakes of the operator: each ends with one clear line and an exit code, quickly, and without a trace."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.rig import command, left_behind, shared_memory


def fails(folder: Path, *arguments: str, limit_s: float = 30.0) -> tuple[int, str]:
    """Exit code and standard error of a command that must fail by itself and leave nothing behind."""
    shared = shared_memory()
    with command(folder, *arguments) as running:
        code = running.ends(limit_s)
        assert "Traceback" not in running.errors, running.errors
        assert "serving" not in running.output
    assert not left_behind(shared)
    return code, running.errors


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path, digest: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = fails(tmp_path, "serve", *digest, "--port", str(port))
    assert code == 4
    assert errors == f"rackserve: port {port} on 127.0.0.1 is in use; choose another with --port\n"


def test_more_kv_than_memory_is_refused_with_both_numbers(tmp_path: Path, digest: list[str]) -> None:
    huge = ["--set", "topology.prefill_blocks=20000000", "--set", "runner.block_tokens=65536"]
    code, errors = fails(tmp_path, "serve", "--port", "0", *digest, *huge)
    assert code == 4
    found = re.fullmatch(
        r"rackserve: KV needs ([\d,]+) MiB of memory and .* MiB but only ([\d,]+) MiB are available; lower .*_blocks.*\n",
        errors,
    )
    assert found is not None, errors
    needed, available = (int(number.replace(",", "")) for number in found.groups())
    assert needed > 10**7 > available > 0


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    code, errors = fails(tmp_path, "serve", "--port", "0", "--model", str(tmp_path / "nothing"))
    assert code == 3
    assert errors.startswith(f"rackserve: {tmp_path / 'nothing'}: no such folder") and errors.count("\n") == 1


@pytest.mark.model
def test_a_truncated_model_file_is_named(tmp_path: Path) -> None:
    from tests.model import tiny
    from tests.text import small_model

    folder = tiny.write_folder(tmp_path / "model")
    small_model.write_folder(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5_000])
    code, errors = fails(tmp_path, "serve", "--port", "0", "--model", str(folder))
    assert code == 3
    assert "ended with exit code 3 before it was ready" in errors
    assert f"FileFormatError: {weights}: truncated" in errors.splitlines()[-1]


def test_devices_that_a_model_cannot_be_split_over_are_refused(tmp_path: Path) -> None:
    code, errors = fails(tmp_path, "serve", "--port", "0", "--model", "golden", "--set", "topology.decode_tp=4")
    assert code == 2
    assert errors.startswith("rackserve: tensor parallel 4: o_groups") and errors.count("\n") == 1


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    program = """
import json, sys
from rackserve.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert "serve" in done.stdout and "simulate" in done.stdout
    assert not imported & {"torch", "zmq", "starlette", "uvicorn", "httpx", "numpy", "tokenizers", "asyncio", "msgspec"}
