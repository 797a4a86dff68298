from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from rackserve.base.errors import ResourceError
from rackserve.live import launch
from rackserve.live.launch import TAIL_LINES, RankProcess


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def test_a_process_reads_its_line_and_its_end_and_words_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    async def trial() -> None:
        code = (
            "import sys; print(sys.stdin.readline().strip()[::-1], file=sys.stderr); print('no newline', end=''); sys.exit(3)"
        )
        process = RankProcess(asyncio.get_running_loop(), python(code), b"hello", "prefill0")
        assert await asyncio.wait_for(process.exited, 10) == 3
        assert process.tail() == "    olleh\n    no newline"
        process.kill()
        process.terminate()

    asyncio.run(trial())
    assert "[prefill0] olleh\n[prefill0] no newline" in capsys.readouterr().err


def test_only_the_last_lines_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    async def trial() -> None:
        code = "import os\nfor i in range(3000): os.write(2, b'line %d\\n' % i)"
        process = RankProcess(asyncio.get_running_loop(), python(code), b"", "x")
        await asyncio.wait_for(process.exited, 10)
        assert process.tail().splitlines() == [f"    line {number}" for number in range(3000 - TAIL_LINES, 3000)]

    asyncio.run(trial())


def test_standard_input_stays_open_until_the_process_is_told_to_end() -> None:
    async def trial() -> None:
        process = RankProcess(asyncio.get_running_loop(), python("import sys; sys.stdin.read()"), b"x", "x")
        process.kill()
        assert await asyncio.wait_for(process.exited, 10) == -9
        assert process.tail() == "    (it printed nothing)"

    asyncio.run(trial())


def test_the_end_of_a_process_waits_for_its_children_and_their_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    async def trial() -> None:
        child = "import sys; sys.stdin.read(); print('the child')"
        code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {child!r}], stdin=subprocess.PIPE)"
        process = RankProcess(asyncio.get_running_loop(), python(code), b"", "x")
        assert await asyncio.wait_for(process.exited, 10) == 0
        assert process.tail() == "    the child"

    asyncio.run(trial())


def test_a_child_that_stays_does_not_hold_up_the_end_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trial() -> None:
        monkeypatch.setattr(launch, "LINGER_S", 0.05)
        child = "import signal; signal.pause()"
        code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {child!r}]).pid)"
        process = RankProcess(asyncio.get_running_loop(), python(code), b"", "x")
        assert await asyncio.wait_for(process.exited, 10) == 0
        os.kill(int(process.tail()), signal.SIGKILL)

    asyncio.run(trial())


def test_a_command_that_cannot_be_started_is_named() -> None:
    async def trial() -> None:
        with pytest.raises(ResourceError, match=r"decode1 cannot be started: No such file.*/no/such"):
            RankProcess(asyncio.get_running_loop(), ("/no/such/program",), b"", "decode1")

    asyncio.run(trial())
