"""Shards of the n-gram tables, owned by processes of their own, feed a model the very rows that its file holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from array import array

import pytest

from rackserve.base.errors import ConfigError, ResourceError
from rackserve.base.step import Step, StepItem
from rackserve.cli import main
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.model.files import GOLDEN_FOLDER, open_model


def rest(address: str) -> list[str]:
    return ["--of", "2", "--listen", address]


def first_tokens(owners: tuple[str, ...]) -> tuple[int, ...]:
    files = open_model(str(GOLDEN_FOLDER))
    layout = kv_layout(files.deepseek_v41, 32)
    runner = DeepseekV41Runner(files, memoryview(bytearray(4 * layout.block_bytes)), 4, 32, RunnerOptions(engram_owners=owners))
    tokens = array("i", range(5, 45))
    try:
        return runner.run(Step(0, (StepItem(1, 0, 40, tokens.tobytes(), (0, 1), True, logprobs=3),))).items[0].tokens
    finally:
        runner.engram.close()


def test_rows_of_two_owner_processes_are_those_of_the_file_and_a_dead_owner_is_an_error() -> None:
    names = [f"ipc://@rackserve-test-{os.getpid()}-{shard}" for shard in range(2)]
    owners = [
        subprocess.Popen(
            [sys.executable, "-m", "rackserve", "serve-rows", "--model", "golden", "--shard", str(shard), *rest(name)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for shard, name in enumerate(names)
    ]
    try:
        for owner in owners:
            assert owner.stdout is not None
            while "serving at" not in (line := owner.stdout.readline()):
                assert line, "the owner ended"
        assert first_tokens(tuple(names)) == first_tokens(("",)) == first_tokens((names[0], ""))
        owners[1].send_signal(signal.SIGTERM)
        assert owners[1].wait(20) == 0
        with pytest.raises(ResourceError, match="owner of Engram rows"):
            first_tokens(tuple(names))
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()


def test_a_shard_beyond_the_last_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["serve-rows", "--model", str(GOLDEN_FOLDER), "--shard", "2", "--of", "2", "--listen", "ipc://@x"])
    assert code == ConfigError.exit_code and "--shard is 2" in capsys.readouterr().err
