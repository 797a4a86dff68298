"""`rackserve route` as a command: it routes, and ends in good order when told to."""

from __future__ import annotations

import asyncio
import signal
import sys

import httpx
import pytest

from rackserve.cli import main
from tests.relay.rig import PROMPT, run
from tests.relay.stub import StubWorker


def test_the_command_routes_until_a_signal_and_lets_answers_end() -> None:
    async def test() -> None:
        worker = StubWorker()
        await worker.start()
        command = [sys.executable, "-m", "rackserve", "route", "--worker", worker.url, "--port", "0", "--policy", "least_load"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            url = line.split(" on ")[1].split(" ")[0]
            async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
                for _ in range(500):
                    try:
                        if (await client.get(url + "/health")).status_code == 200:
                            break
                    except httpx.ConnectError:
                        pass
                    await asyncio.sleep(0.01)
                worker.hold = asyncio.Event()
                call = asyncio.create_task(client.post(url + "/v1/completions", json={"prompt": PROMPT}))
                while not worker.num_open:
                    await asyncio.sleep(0.002)
                process.send_signal(signal.SIGTERM)
                while (await client.get(url + "/health")).status_code != 503:
                    await asyncio.sleep(0.002)
                worker.hold.set()
                assert (await call).status_code == 200
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await worker.stop()

    run(test)


@pytest.mark.parametrize("words", [[], ["--worker", "nowhere"], ["--worker", "http://a:1", "--policy", "dice"]])
def test_settings_that_make_no_sense_end_with_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
