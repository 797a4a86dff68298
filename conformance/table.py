"""What a run found: a table for people, JSON for programs, Markdown for docs/conformance.md."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance.cases import Outcome

HEAD = ("suite", "version", "passed", "failed", "differs", "skipped", "seconds")


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table, then every case that did not simply pass, with its reason."""
    table = Table(*HEAD)
    for outcome in outcomes:
        table.add_row(*_row(outcome), style=None if outcome.is_well else "red")
    console.print(table)
    for outcome in outcomes:
        for about, reason in told(outcome):
            console.print(f"{outcome.suite}: {about}: {reason}", markup=False, highlight=False, soft_wrap=True)


def told(outcome: Outcome) -> list[tuple[str, str]]:
    """(what, why) of everything that did not simply pass."""
    lines = [("broke off", outcome.error)] if outcome.error else []
    lines += [("skipped", outcome.skipped)] if outcome.skipped else []
    return lines + [(f"{each.status}: {each.name}", each.detail) for each in outcome.cases if each.status != "passed"]


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table and the reasons, as docs/conformance.md has them."""
    rows = ["| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    rows += ["| " + " | ".join(_row(outcome)) + " |" for outcome in outcomes]
    reasons = [
        f"| {outcome.suite} | {about.replace('|', '/')} | {' '.join(reason.split()).replace('|', '/')} |"
        for outcome in outcomes for about, reason in told(outcome)
    ]  # fmt: skip
    return "\n".join([*rows, "", "| suite | case | why |", "|---|---|---|", *reasons, ""])


def write_json(outcomes: Sequence[Outcome], path: Path, isolation: str) -> None:
    """All of it. `isolation`: how the run was kept from the network."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "network": isolation,
        "suites": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.skipped:
        return outcome.suite, outcome.version, "–", "–", "–", "skipped", ""
    counts = [str(outcome.count(status)) for status in ("passed", "failed", "differs", "skipped")]
    if outcome.error:
        counts[1] += " + broke off"
    return outcome.suite, outcome.version, *counts, f"{outcome.seconds:.0f}"
