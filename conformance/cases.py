"""What a suite is, what it finds, and what it has to work with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["passed", "failed", "differs", "skipped"]
Packager = Literal["pip", "npm", "none"]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that was tried. `differs`: it fails, and is known to; `detail` then has the reason, else what went wrong."""

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pins:
    """Packages to install, each at one version. `command`: the program by which one sees that they are there."""

    packager: Packager = "none"
    packages: tuple[str, ...] = ()
    command: str = ""

    @property
    def version(self) -> str:
        """Of the first package, which is the one that the suite is about."""
        name, _, version = self.packages[0].rpartition("==" if self.packager == "pip" else "@")
        return version if name else ""


@dataclass(frozen=True, slots=True)
class Rack:
    """A served model: `url` without /v1; `recording`: what it writes of every request that ended."""

    url: str
    model: str
    recording: Path


class SuiteError(Exception):
    """The suite could not be run to its end; the text says why."""


@dataclass(slots=True)
class Site:
    """What a suite works with.

    home     the folder its packages are in
    scratch  an empty folder, its own
    rack     starts the rack of that name if it is not up: see `racks`
    left_s   seconds it has
    """

    home: Path
    scratch: Path
    rack: Callable[[str], Rack]
    left_s: Callable[[], float]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def programs(self) -> Path:
        """Where the commands of its packages are."""
        node = self.home / "node_modules" / ".bin"
        return node if node.is_dir() else self.home / "bin"

    def run(self, command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the scratch folder to its end, its own programs first. SuiteError at the suite's deadline."""
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **self.environment, **variables, "PATH": path}
        words = [str(word) for word in command]
        with subprocess.Popen(
            words, cwd=self.scratch, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=max(1.0, self.left_s()))
            except subprocess.TimeoutExpired:
                raise SuiteError(f"{Path(words[0]).name} did not end before the suite's deadline") from None
            finally:
                _end_group(process.pid)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@dataclass(frozen=True, slots=True)
class Suite:
    """`run` tries things and says how each went; `differences`: why cases that fail are meant to, by name."""

    name: str
    about: str
    run: Callable[[Site], list[Case]]
    pins: Pins = Pins()
    deadline_s: float = 120.0
    on_demand: bool = False
    differences: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a suite went. `skipped`: why it did not run; `error`: why it broke off."""

    suite: str
    version: str
    cases: tuple[Case, ...] = ()
    seconds: float = 0.0
    skipped: str = ""
    error: str = ""

    def count(self, status: Status) -> int:
        return sum(case.status == status for case in self.cases)

    @property
    def is_well(self) -> bool:
        return not self.error and not self.count("failed")


def case(name: str, holds: object, detail: object = "") -> Case:
    """A case that passed if `holds`; `detail` is told only if not."""
    return Case(name, "passed") if holds else Case(name, "failed", str(detail)[-1_000:])


def judge(suite: Suite, cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases as `suite.differences` has them; a difference that is none any more, or was not tried, is a failure."""
    judged = []
    for found in cases:
        reason = suite.differences.get(found.name)
        if reason is None or found.status == "skipped":
            judged.append(found)
        elif found.status == "failed":
            judged.append(Case(found.name, "differs", reason))
        else:
            judged.append(Case(found.name, "failed", f"it passes now; take it out of the differences ({reason})"))
    missing = suite.differences.keys() - {found.name for found in cases}
    judged += [Case(name, "failed", "named as a difference, but the suite has no such case") for name in sorted(missing)]
    return tuple(judged)


def _end_group(group: int) -> None:
    """End what a command has left running."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def driven(done: subprocess.CompletedProcess[str]) -> list[Case]:
    """The cases that a driver printed, a JSON line each. SuiteError if it broke off."""
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"case"')]
    found = [json.loads(line) for line in lines]
    if done.returncode or not found:
        raise SuiteError(f"its driver broke off after {len(found)} cases: {(done.stderr or done.stdout).strip()[-500:]}")
    return [case(each["case"], not each["error"], each["error"]) for each in found]
