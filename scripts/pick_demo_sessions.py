"""Makes rackserve/bench/data/demo_sessions.jsonl.gz: a few short pieces of recorded sessions, in the compact form.

Usage: pick_demo_sessions.py CORPUS OUTPUT

CORPUS is a compact trace file of whole sessions (see rackserve/bench/trace.py). Each picked session is cut to its first turns,
and each of its subagents to its first ones; nothing else is changed.
"""

from __future__ import annotations

import gzip
import json
import sys
from typing import Any

PICKED: dict[str, tuple[int, int]] = {
    "trace_0274": (6, 2),
    "trace_0705": (10, 0),
    "trace_0472": (17, 0),
    "trace_0003": (5, 2),
    "trace_0557": (17, 0),
    "trace_0518": (8, 0),
    "trace_0019": (12, 0),
    "trace_0527": (15, 0),
}
"""Session id -> (entries of the root kept, turns of each subagent kept)."""


def cut(session: dict[str, Any], num_entries: int, num_turns: int) -> dict[str, Any]:
    """The session's first entries, with id lists written out and packed again, since what is cut changes who precedes whom."""
    ids: list[int] = []
    packed: list[int] = []

    def unpack(entries: list[dict[str, Any]]) -> None:
        nonlocal ids
        for entry in entries:
            if "requests" in entry:
                unpack(entry["requests"])
                continue
            tail = [i for first, count in entry.pop("tail") for i in range(first, first + count)]
            ids = ids[: entry.pop("lcp")] + tail
            entry["hash_ids"] = ids

    def pack(entries: list[dict[str, Any]]) -> None:
        nonlocal packed
        for entry in entries:
            if "requests" in entry:
                pack(entry["requests"])
                continue
            now = entry.pop("hash_ids")
            pairs = zip(now, packed, strict=False)
            lcp = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(now), len(packed)))
            runs: list[list[int]] = []
            for i in now[lcp:]:
                if runs and i == runs[-1][0] + runs[-1][1]:
                    runs[-1][1] += 1
                else:
                    runs.append([i, 1])
            entry["lcp"], entry["tail"], packed = lcp, runs, now

    unpack(session["requests"])
    kept = session["requests"][:num_entries]
    for entry in kept:
        if "requests" in entry:
            entry["requests"] = entry["requests"][:num_turns]
            last = entry["requests"][-1]
            entry["duration_ms"] = round(1000 * (last["t"] + last.get("api_time", 0)))
    pack(kept)
    session["requests"] = kept
    session.pop("totals", None)
    return session


def main(corpus: str, output: str) -> None:
    """Write the picked sessions in the order of `PICKED`."""
    found = {}
    with gzip.open(corpus, "rt") as lines:
        for line in lines:
            session = json.loads(line)
            if session["id"] in PICKED:
                found[session["id"]] = cut(session, *PICKED[session["id"]])
    text = "".join(json.dumps(found[name], separators=(",", ":")) + "\n" for name in PICKED)
    with open(output, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        file.write(text.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
