"""Print the README's table: lowest and highest figures of several demo runs.

rackserve demo --seed 1 --seed 2 --seed 3 --out runs/demo
python scripts/demo_ranges.py runs/demo/seed-*
"""

from __future__ import annotations

import sys
from pathlib import Path

from rackserve.bench.records import read_recording
from rackserve.replay import arm_of
from rackserve.report.compare import FIGURES, Arm, text_of

ARMS = ("live-a", "live-b", "simulated-a", "simulated-b")
ROWS = (
    ("hit rate", "hit rate"),
    ("hit rate of an unbounded cache", "hit rate of an unbounded cache"),
    ("p50", "time to first token, median (ms)"),
    ("p90", "time to first token, p90 (ms)"),
    ("interactivity p50", "interactivity, median (tokens/s/user)"),
    ("output", "tokens/s per rank: output"),
    ("uncached input", "tokens/s per rank: uncached input"),
    ("cached input", "tokens/s per rank: cached input"),
    ("idle while another rank queues", "a rank idle while another queues"),
    ("duration (s)", "duration (s)"),
)


def spread(values: list[float], kind: str) -> str:
    """The lowest and the highest value, once if they read the same; a dash where there is none."""
    low, high = (text_of(pick(values), kind) for pick in (min, max)) if values else ("–", "–")
    return low if low == high else f"{low} to {high}"


def main(folders: list[str]) -> int:
    """Print the table of the runs in `folders`."""
    columns: list[list[Arm]] = [[arm_of(read_recording(Path(folder) / f"{arm}.jsonl")) for folder in folders] for arm in ARMS]
    print(f"| | {' | '.join(arm.replace('-', ' ') for arm in ARMS)} |\n|---|{'---:|' * len(ARMS)}")
    for name, title in ROWS:
        kind, get = next((kind, get) for _, figure, kind, get in FIGURES if figure == name)
        cells = [spread([value for arm in arms if (value := get(arm)) is not None], kind) for arms in columns]
        print(f"| {title} | {' | '.join(cells)} |")
    errors = [[e for arm in arms if (e := arm.summary.run.step_error) is not None] for arms in columns]
    print(f"| step-time model, held-out error | {' | '.join(spread(found, 'share') for found in errors)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
