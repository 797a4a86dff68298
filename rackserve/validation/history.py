"""What earlier validations came to: one JSON line a run, and which figures have moved since the last."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rackserve.base.errors import FileFormatError

SAME = 1e-6
"""Relative change below which a figure has not moved."""


class Change(msgspec.Struct, frozen=True):
    """A figure that is not what it was."""

    name: str
    before: float
    now: float


class Drift(msgspec.Struct, frozen=True):
    """Figures that both lines have: how many, and those that moved. `since` names the older line."""

    since: str
    num_same: int
    changes: tuple[Change, ...]


def revision() -> str:
    """The commit this code is from, with `-dirty` if the tree differs from it; empty outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def figures(value: object, name: str = "") -> dict[str, float]:
    """Every number of a JSON value by its path; items of lists are named by their texts, and by number where those repeat."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {name: float(value)}
    named = value.items() if isinstance(value, Mapping) else _named(value)  # type: ignore[arg-type]
    found: dict[str, float] = {}
    for key, part in named:
        found |= figures(part, f"{name} / {key}" if name else str(key))
    return found


def _named(items: list[object]) -> list[tuple[str, object]]:
    made: list[tuple[str, object]] = []
    for number, item in enumerate(items):
        texts = [part for part in item.values() if isinstance(part, str)] if isinstance(item, Mapping) else []
        made.append((" ".join(texts) or str(number), item))
    names = [name for name, _ in made]
    return [(name if names.count(name) == 1 else f"{name} {number}", item) for number, (name, item) in enumerate(made)]


def last_line(path: Path) -> dict[str, object] | None:
    """The newest entry of a history; None if there is none yet. FileFormatError if it is no history."""
    if not path.exists():
        return None
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        return msgspec.json.decode(lines[-1], type=dict[str, object]) if lines else None
    except (OSError, msgspec.MsgspecError) as error:
        raise FileFormatError(f"{path}: {error}; give a file of earlier validations, or a new one, to --history") from None


def drift(before: Mapping[str, object], now: Mapping[str, object]) -> Drift:
    """What has moved between two entries, largest first."""
    old, new = figures(before), figures(now)
    both = [name for name in new if name in old]
    moved = [Change(name, old[name], new[name]) for name in both if abs(new[name] - old[name]) > SAME * abs(old[name])]
    moved.sort(key=lambda change: -abs(change.now - change.before) / (abs(change.before) or 1.0))
    since = " ".join(str(before.get(key, "")) for key in ("date", "revision")).strip()
    return Drift(since, len(both) - len(moved), tuple(moved))


def append(path: Path, entry: msgspec.Struct) -> None:
    """Add one line. FileFormatError if the file cannot be written."""
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error}); give another file to --history") from None
