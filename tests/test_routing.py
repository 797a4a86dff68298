"""`rackserve route` as a command: it routes, and ends in good order when told to."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import pytest

from rackserve.api.keys import new_key
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


def test_a_key_that_is_taken_out_of_the_file_is_not_known_after_a_hang_up_signal(tmp_path: Path) -> None:
    file, settings = tmp_path / "keys.toml", tmp_path / "route.yaml"
    (first, entry), (second, other) = new_key("first"), new_key("second")
    file.write_text(entry)

    async def test() -> None:
        worker = StubWorker()
        await worker.start()
        settings.write_text(f"workers: [{{url: '{worker.url}'}}]\nport: 0\nsecurity: {{key_file: {file}}}\n")
        command = [sys.executable, "-m", "rackserve", "route", "--config", str(settings)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        try:
            assert process.stdout is not None and process.stderr is not None
            line = (await process.stdout.readline()).decode()
            assert "(a key is asked for;" in line
            url = line.split(" on ")[1].split(" ")[0] + "/v1/models"

            async def status(key: str) -> int:
                return (await client.get(url, headers={"authorization": f"Bearer {key}"})).status_code

            async with httpx.AsyncClient(timeout=10, trust_env=False, transport=httpx.AsyncHTTPTransport(retries=3)) as client:
                assert (await status(first), await status(second)) == (200, 401)
                for text, told, expected in (
                    ("no TOML [", "not taken over", (200, 401)),
                    (other, "keys: 1, gone: 1", (401, 200)),
                ):
                    file.write_text(text)
                    process.send_signal(signal.SIGHUP)
                    while told not in (await process.stderr.readline()).decode():
                        pass
                    assert (await status(first), await status(second)) == expected
        finally:
            process.terminate()
            await process.communicate()
            await worker.stop()

    run(test)
