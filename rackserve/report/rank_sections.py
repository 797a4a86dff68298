"""The parts of a page that show single ranks and requests: balance over time, and the waterfall of a chosen session."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil

import msgspec

from rackserve.base.events import StepDone
from rackserve.base.topology import Role
from rackserve.base.units import NS_PER_S, to_seconds
from rackserve.bench.rack import placeable, role_of
from rackserve.bench.records import RecordedEvent, RequestRecord
from rackserve.report.charts import HeatRow, heat_map, shades
from rackserve.report.compare import Arm
from rackserve.report.pieces import data_table, figure

BINS, MAX_BINS = 60, 600
"""Stretches of time in a heat map: a second each for runs of one to ten minutes."""
MAX_SESSIONS = 200
"""Sessions of a run that a waterfall can be chosen of: those with the most requests."""


def heat_rows(events: Sequence[RecordedEvent], role: Role) -> tuple[list[HeatRow], float]:
    """(a row per rank of a role, seconds of the run): work per second, its steps' work spread evenly over their time.

    Work is positions computed on a prefill rank, sequences in the step on a decode rank (so a row then shows its mean batch).
    """
    steps = [
        (item.at_ns - event.duration_ns, item.at_ns, event)
        for item in events
        if isinstance(event := item.event, StepDone) and role_of(event.rank.worker) == role
    ]
    if not steps:
        return [], 0.0
    zero, end = min(start for start, _, _ in steps), max(end for _, end, _ in steps)
    bins = min(MAX_BINS, max(BINS, ceil(to_seconds(end - zero))))
    width = max(1, (end - zero + bins - 1) // bins)
    ranks = {event.rank for _, _, event in steps} | placeable(events, role)
    work = {rank: [0.0] * bins for rank in sorted(ranks, key=lambda rank: rank_order(str(rank)))}
    for start, stop, event in steps:
        if event.dummy:
            continue
        amount = event.new_tokens * event.num_passes if role == "prefill" else event.num_sequences * to_seconds(stop - start)
        row = work[event.rank]
        for place in range((start - zero) // width, min(bins - 1, (stop - zero) // width) + 1):
            inside = min(stop, zero + (place + 1) * width) - max(start, zero + place * width)
            row[place] += amount * inside / (stop - start) if stop > start else amount
    rows = [HeatRow(str(rank), tuple(value * NS_PER_S / width for value in values)) for rank, values in work.items()]
    return rows, to_seconds(width * bins)


def rank_order(name: str) -> tuple[bool, list[int], str]:
    """Sorts names of ranks as people count: prefill before decode, prefill2.0 before prefill10.0."""
    role = name.rstrip("0123456789.")
    return role != "prefill", [int(part) for part in name.removeprefix(role).split(".") if part], role


def _maps(arms: Sequence[Arm], role: Role, unit: str, note: str) -> str:
    """A heat map per run, all to one scale."""
    drawn = [(arm.name, *heat_rows(arm.events, role)) for arm in arms]
    top = max((value for _, rows, _ in drawn for row in rows for value in row.values), default=0.0)
    if not top:
        return ""
    figures = [
        figure(f"{name}: {role}", heat_map(rows, f"{role} ranks of {name} over time", unit, until_s, top), note)
        for name, rows, until_s in drawn
        if rows
    ]
    return f'{shades(top, unit)}<section class="plots">{"".join(figures)}</section>'


def balance_section(arms: Sequence[Arm]) -> str:
    """A heat map per run and role, and the ranks' figures as a table; empty if no run recorded steps."""
    maps = _maps(arms, "prefill", "positions/s", "positions computed") + _maps(arms, "decode", "sequences", "mean batch")
    if not maps:
        return ""
    table = []
    for arm in arms:
        for rank in sorted(arm.rack.ranks, key=lambda rank: rank_order(rank.rank)) if arm.rack else ():
            counts = (rank.num_requests, rank.prompt_tokens, rank.uncached_tokens, rank.local_tokens, rank.fetched_tokens)
            busy = f"{to_seconds(rank.busy_ns):,.2f}"
            table.append((arm.name, rank.rank, *(f"{number:,}" for number in counts), f"{rank.num_steps:,}", busy))
    heads = ("run", "rank", "requests", "prompt tokens", "computed", "from its own cache", "from the pool", "steps", "busy s")
    return f"<h2>How even the ranks are</h2>{maps}<h3>Ranks</h3>{data_table('ranks', heads, table, texts=2)}"


def _request(record: RequestRecord, zero: int) -> list[object]:
    """[name, due, sent, first, end, prompt, cached, output, error]; seconds from `zero`, null where there was none."""
    first = to_seconds(record.first_ns - zero) if record.first_ns >= 0 else None
    times = (to_seconds(at - zero) for at in (record.due_ns, record.sent_ns))
    counts = (record.prompt_tokens or record.planned_prompt_tokens, record.cached_tokens, record.output_tokens)
    return [record.id, *times, first, to_seconds(record.ended_ns - zero), *counts, record.error]


def waterfall_data(arms: Sequence[Arm]) -> list[dict[str, object]]:
    """Per run its sessions with their requests in order of sending, as the page's script reads them."""
    made: list[dict[str, object]] = []
    for arm in arms:
        sessions: dict[str, list[RequestRecord]] = {}
        for record in arm.records:
            if not record.warmup:
                sessions.setdefault(record.session, []).append(record)
        largest = sorted(sessions, key=lambda name: (-len(sessions[name]), name))[:MAX_SESSIONS]
        zero = min((record.due_ns for record in arm.records), default=0)
        listed = []
        for name in sorted(largest):
            requests = sorted(sessions[name], key=lambda record: (record.sent_ns, record.id))
            listed.append({"name": name, "requests": [_request(record, zero) for record in requests]})
        if listed:
            made.append({"name": arm.name, "num_sessions": len(sessions), "sessions": listed})
    return made


def waterfall_section(arms: Sequence[Arm]) -> str:
    """A chooser of sessions and the place where the page's script draws the chosen one; empty if no run has records."""
    data = waterfall_data(arms)
    if not data:
        return ""
    names = []
    for number, run in enumerate(arm for arm in data):
        sessions = run["sessions"]
        assert isinstance(sessions, list)
        options = "".join(
            f'<option value="{number}/{place}">{escape(str(session["name"]))} ({len(session["requests"])} requests)</option>'
            for place, session in enumerate(sessions)
        )
        left = "" if run["num_sessions"] == len(sessions) else f", the {len(sessions)} largest of {run['num_sessions']}"
        names.append(f'<optgroup label="{escape(str(run["name"]))}{left}">{options}</optgroup>')
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    keys = (("w0", "planned, not sent"), ("t0", "waiting for the first token"), ("t1", "decoding"), ("w2", "failed"))
    legend = "".join(f'<li><i class="{look}"></i>{name}</li>' for look, name in keys)
    return (
        '<h2>One session</h2><figure class="wide"><figcaption><b>Waterfall</b> '
        f'<label>session <select id="session">{"".join(names)}</select></label></figcaption>'
        f'<ul class="legend">{legend}</ul><div id="waterfall"></div></figure>'
        f'<script type="application/json" id="sessions">{text}</script>'
    )
