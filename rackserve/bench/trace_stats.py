"""Statistics of a trace, beside those published for the corpus that agent benchmarks replay."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rackserve.base.units import NS_PER_S
from rackserve.bench.metrics import percentile
from rackserve.bench.session import HASH_ID_BYTES, Session, requests_of, shared_ids
from rackserve.bench.streams import streams_of


class Statistic(msgspec.Struct, frozen=True):
    """One line of the comparison; `published` is None where nothing was published."""

    name: str
    value: float
    published: float | None


PUBLISHED: dict[str, float] = {
    "requests per session, mean": 98_827 / 393,
    "main turns per session, p50": 65,
    "main turns per session, p90": 330,
    "main turns per session, mean": 56_798 / 393,
    "sessions with subagents": 0.445,
    "subagent requests, share of all": 42_029 / 98_827,
    "input tokens, mean": 218_900,
    "input tokens, p50": 142_016,
    "input tokens, p90": 549_504,
    "input tokens, p99": 863_424,
    "input tokens of main turns, p50": 254_080,
    "input tokens of main turns, p90": 651_008,
    "input tokens of subagents, p50": 64_000,
    "input tokens of subagents, p90": 196_326,
    "output tokens, mean": 1_077,
    "output tokens, p50": 444,
    "output tokens of main turns, p50": 616,
    "output tokens of main turns, mean": 1_374,
    "output tokens of main turns, p90": 3_502,
    "new tokens per request (infinite cache), mean": 3_702,
    "new tokens of main turns, p50": 1_664,
    "new tokens of main turns, mean": 3_792,
    "new tokens of main turns, p99": 46_722,
    "ideal hit rate": 0.9831,
    "ideal hit rate within one conversation": 0.9721,
    "pause between main turns in s, p50": 4.9,
    "pause between main turns in s, p90": 131.5,
    "pause between main turns in s, mean": 395,
    "pauses above 300 s, share": 0.045,
}
"""Of 393 recorded coding-agent sessions (AgentX, corpus 062126)."""


class TraceStatistics:
    """Collects figures session by session, keeping none of them."""

    def __init__(self) -> None:
        self._sessions = self._with_subagents = 0
        self._turns: list[float] = []
        self._gaps: list[float] = []
        self._inputs: dict[str, list[float]] = {"main": [], "subagent": []}
        self._outputs: dict[str, list[float]] = {"main": [], "subagent": []}
        self._new_main: list[float] = []
        self._blocks = self._hits = self._own_hits = 0
        self._new_tokens = 0

    def add(self, session: Session) -> None:
        """Count one session. Pauses are those between main turns, from the end of an answer to the next sending."""
        streams = streams_of(session)
        self._sessions += 1
        self._with_subagents += len(streams) > 1
        self._turns.append(len(streams[0].turns))
        self._gaps += [gap / NS_PER_S for gap in streams[0].gaps_ns[1:]]
        for number, stream in enumerate(streams):
            kind = "main" if number == 0 else "subagent"
            self._inputs[kind] += [turn.input_tokens for turn in stream.turns]
            self._outputs[kind] += [turn.output_tokens for turn in stream.turns]
            self._own_hits += _own_hits([turn.hash_ids for turn in stream.turns])
        self._add_new_main(streams[0].turns[k].hash_ids for k in range(len(streams[0].turns)))
        seen: set[int] = set()
        previous = b""
        for request in requests_of(session.entries):
            same = shared_ids(request.hash_ids, previous)
            known = sum(1 for number in memoryview(request.hash_ids).cast("i")[same:] if number in seen)
            seen.update(memoryview(request.hash_ids).cast("i")[same:])
            previous = request.hash_ids
            self._blocks += request.num_blocks
            self._hits += same + known
            self._new_tokens += request.input_tokens - (same + known) * session.block_tokens
        self._block_tokens = session.block_tokens

    def _add_new_main(self, prompts: Iterable[bytes]) -> None:
        previous = None
        for ids in prompts:
            if previous is not None:
                self._new_main.append(len(ids) // HASH_ID_BYTES - shared_ids(ids, previous))
            previous = ids

    def rows(self) -> list[Statistic]:
        """All figures of the sessions added so far, in the order of `PUBLISHED`."""
        everything = self._inputs["main"] + self._inputs["subagent"]
        outputs = self._outputs["main"] + self._outputs["subagent"]
        new_main = [blocks * self._block_tokens for blocks in self._new_main] or [0]
        gaps = self._gaps or [0.0]
        found = {
            "requests per session, mean": len(everything) / self._sessions,
            **_spread("main turns per session", self._turns),
            "sessions with subagents": self._with_subagents / self._sessions,
            "subagent requests, share of all": len(self._inputs["subagent"]) / len(everything),
            **_spread("input tokens", everything),
            **_spread("input tokens of main turns", self._inputs["main"]),
            **_spread("input tokens of subagents", self._inputs["subagent"] or [0]),
            **_spread("output tokens", outputs),
            **_spread("output tokens of main turns", self._outputs["main"]),
            "new tokens per request (infinite cache), mean": self._new_tokens / len(everything),
            **_spread("new tokens of main turns", new_main),
            "ideal hit rate": self._hits / max(1, self._blocks),
            "ideal hit rate within one conversation": self._own_hits / max(1, self._blocks),
            **_spread("pause between main turns in s", gaps),
            "pauses above 300 s, share": sum(gap > 300 for gap in gaps) / len(gaps),
        }
        return [Statistic(name, found[name], published) for name, published in PUBLISHED.items()]


def _own_hits(prompts: list[bytes]) -> int:
    """Blocks of a conversation's prompts that were in an earlier one of them."""
    seen: set[int] = set()
    hits, previous = 0, b""
    for ids in prompts:
        same = shared_ids(ids, previous)
        rest = memoryview(ids).cast("i")[same:]
        hits += same + sum(1 for number in rest if number in seen)
        seen.update(rest)
        previous = ids
    return hits


def _spread(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {f"{name}, p{round(share * 100)}": percentile(ordered, share) for share in (0.5, 0.9, 0.99)}
    return {**shares, f"{name}, mean": sum(ordered) / len(ordered)}
