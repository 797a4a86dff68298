"""Do what the README's first five minutes say: its commands are read out of it and run, and what they print is judged.

python scripts/first_five_minutes.py

Prints when each step was done. Only the port is another one, a free one, and results go to a temporary folder. Setting up is
left out: it runs with the Python and the programs of the environment that it is started with.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

README = Path(__file__).parents[1] / "README.md"
HEADING = "## Serve: the first five minutes"
URL = "http://127.0.0.1:8000"
"""Where the README has its server."""

ACTIVATE = ". .venv/bin/activate"
STEP_S = 120.0
"""A step that takes longer has failed."""


class Failed(Exception):
    """The README says what is not so."""


class Row(NamedTuple):
    """A step of the timetable: when it had ended, how long it took (seconds), and what was seen."""

    what: str
    ended_s: float
    took_s: float
    seen: str


class Step(NamedTuple):
    """A step: the words by which its commands are known, and what their output shows. `check` raises Failed."""

    what: str
    words: str
    check: Callable[[str, Path], str]
    times: int = 1


# ---------------------------------------------------------------- reading the README


def blocks(text: str) -> list[str]:
    """The blocks of commands in the README's first five minutes. Raises Failed if there are none."""
    _, found, rest = text.partition(f"{HEADING}\n")
    section = rest.partition("\n## ")[0]
    commands = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    if not found or not commands:
        raise Failed(f"the README has no commands under {HEADING!r}")
    return commands


def match(commands: Sequence[str], steps: Sequence[Step]) -> list[tuple[Step, str]]:
    """Each step with its block, in the README's order. Raises Failed unless each has exactly one and none is left over."""
    pairs = []
    for block in commands:
        named = [step for step in steps if step.words in block]
        if len(named) != 1:
            raise Failed(f"{len(named)} steps check this block of the README; one should:\n{block}")
        pairs.append((named[0], block))
    if [step for step, _ in pairs] != list(steps):
        raise Failed(f"the README's steps are {[step.what for step, _ in pairs]}, expected {[step.what for step in steps]}")
    return pairs


# ---------------------------------------------------------------- what is seen


def chunks(output: str) -> list[dict[str, Any]]:
    """The events of a stream. Raises Failed if it has not ended."""
    lines = [line.removeprefix("data: ") for line in output.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise Failed(f"the stream did not end: {output[-500:]}")
    return [json.loads(line) for line in lines[:-1]]


class Asked:
    """The same prompt twice: it streams, and the second time part of it is reused."""

    def __init__(self) -> None:
        self._num_asked = 0

    def __call__(self, output: str, folder: Path) -> str:
        self._num_asked += 1
        told = chunks(output)
        text = "".join(choice["delta"].get("content") or "" for chunk in told for choice in chunk["choices"])
        num_pieces = sum(bool(choice["delta"].get("content")) for chunk in told for choice in chunk["choices"])
        usage = told[-1]["usage"]
        cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        if num_pieces < 2 or (cached > 0) is not (self._num_asked > 1):
            raise Failed(f"time {self._num_asked}: {num_pieces} pieces, {cached} of {prompt} tokens reused")
        return f"{text!r}, {cached} of {prompt} prompt tokens reused"


def killed(output: str, folder: Path) -> str:
    """The answer is whole though its rank was killed."""
    told = chunks(output)
    usage, reason = told[-1]["usage"], told[-2]["choices"][0]["finish_reason"]
    if usage["completion_tokens"] != 400 or reason != "length" or usage["attempts"] < 2:
        raise Failed(f"{usage['completion_tokens']} tokens in {usage['attempts']} attempts, finished by {reason}")
    return f"{usage['completion_tokens']} tokens in {usage['attempts']} attempts"


def measured(output: str, folder: Path) -> str:
    """The benchmark was valid and has drawn a curve."""
    report = folder / "runs/first/report.html"
    curve = json.loads((folder / "runs/first/frontier.json").read_text(encoding="utf-8"))
    page = report.read_text(encoding="utf-8")
    if len(curve["points"]) != 2 or "<svg" not in page:
        raise Failed(f"{len(curve['points'])} points, and {report.name} of {len(page)} characters")
    told = "; ".join(
        f"{point['interactivity']:.3g} tok/s/user at {point['per_gpu']:.3g} tok/s/GPU" for point in curve["points"]
    )
    return f"{told}; {report.name} drawn"


def compared(output: str, folder: Path) -> str:
    """There is a multiple at the speed asked for."""
    row = next((line for line in output.splitlines() if re.match(r"\s*300 [┃│]", line)), "")
    found = re.search(r"([\d.]+)×", row)
    if found is None:
        raise Failed(f"no multiple at 300 tok/s/user:\n{output}")
    return f"Vera Rubin / GB300 at 300 tok/s/user: {found[1]}x per GPU, simulated, not calibrated"


STEPS = (
    Step("ask, ask again", "/v1/chat/completions", Asked(), times=2),
    Step("kill the decode rank", "kill -9", killed),
    Step("measure", "rackserve bench", measured),
    Step("a rack you do not own", "rackserve compare", compared),
)
SERVE = Step("serve", "rackserve serve", lambda output, folder: output)


def page(url: str) -> str:
    """The page and everything that it names answers. Raises Failed."""
    seen: dict[str, int] = {}
    wanted = ["/"]
    while wanted:
        path = wanted.pop()
        with urllib.request.urlopen(url + path, timeout=STEP_S) as answer:
            text = answer.read().decode()
        seen[path] = len(text)
        named = re.findall(r"""(?:src|href|from)\s*=?\s*["'](/[\w./-]+)["']""", text)
        wanted += [name for name in named if name not in seen and name not in wanted]
    if len(seen) < 5:
        raise Failed(f"the page consists of {sorted(seen)} only")
    return f"{len(seen)} files, {sum(seen.values()) >> 10} KiB"


# ---------------------------------------------------------------- running it


def run(block: str, url: str, folder: Path) -> str:
    """What a block of commands prints. Raises Failed if one of them fails."""
    command = ["bash", "-euo", "pipefail", "-c", block.replace(URL, url).replace("rackserve top", f"rackserve top --url {url}")]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=STEP_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Failed(f"not done within {STEP_S:g} s:\n{block}") from error
    if process.returncode:
        raise Failed(f"exit code {process.returncode}:\n{block}\n{output[-2000:]}\n{errors[-2000:]}")
    return output


def environment() -> dict[str, str]:
    """Ours, with the programs beside this Python first."""
    found = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    found.pop("RACKSERVE_API_KEY", None)
    return found


@contextmanager
def serving(block: str, folder: Path) -> Iterator[str]:
    """What a server that the block's commands started says when it is ready. Raises Failed unless it ends in good order."""
    if block.count("rackserve serve") != 1:
        raise Failed(f"one `rackserve serve` is expected:\n{block}")
    commands = "\n".join(line for line in block.splitlines() if not line.startswith(ACTIVATE))
    command = ["bash", "-c", "exec " + commands.strip().replace("rackserve serve", "rackserve serve --port 0")]
    log = folder / "serve.log"
    with log.open("w") as written:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=written, stderr=subprocess.STDOUT)
    try:
        yield _ready(process, log)
        process.send_signal(signal.SIGTERM)
        if process.wait(STEP_S) != 0:
            raise Failed(f"the server ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STEP_S)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + STEP_S
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"^serving \S+ on http://\S+", log.read_text(), re.MULTILINE)
        if found is not None:
            return found[0]
        time.sleep(0.05)
    raise Failed(f"not ready within {STEP_S:g} s:\n{log.read_text()[-2000:]}")


def rehearse(text: str, told: Callable[[Row], None]) -> None:
    """Run the first five minutes of the README `text`; `told` gets each row as it ends. Raises Failed."""
    start = last = time.monotonic()

    def tell(what: str, seen: str) -> None:
        nonlocal last
        now = time.monotonic()
        told(Row(what, now - start, now - last, seen))
        last = now

    (_, serve), *rest = match(blocks(text), (SERVE, *STEPS))
    with tempfile.TemporaryDirectory(prefix="rackserve-five-") as name:
        folder = Path(name)
        with serving(serve, folder) as said:
            url = said.split()[-1]
            if f"`{said.replace(url, URL)}`" not in text:
                raise Failed(f"the README does not say what the server says: {said}")
            tell("serve", said)
            for step, block in rest:
                for _ in range(step.times):
                    tell(step.what, step.check(run(block, url, folder), folder))
                if step.what == STEPS[0].what:
                    tell("the page", page(url))
        tell("stop", "the server ended in good order")


def main() -> int:
    """Print the timetable; 1 if the README says what is not so."""
    print(f"{'done at':>8}  {'took':>7}  {'step':22}  seen")
    try:
        rehearse(
            README.read_text(encoding="utf-8"),
            lambda row: print(f"{row.ended_s:6.1f} s  {row.took_s:5.1f} s  {row.what:22}  {row.seen}", flush=True),
        )
    except Failed as error:
        print(f"the README's first five minutes fail: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
