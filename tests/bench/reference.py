"""A second closed-loop replayer, written without regard to speed: everything is looked at again after every event.

It shares no code with the package but the recording's values and the start draw, and says when each request was sent and ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rackserve.bench.draw import start_share
from rackserve.bench.session import Session, Subagent, TraceRequest

Answer = Callable[[str, int, int], int]
"""(tree, stream, turn) -> nanoseconds the answer takes."""


@dataclass
class Talk:
    """One conversation. state: unborn, waiting (for `at` and its joins), held, flying or over."""

    starts: list[int]
    ends: list[int]
    parent: int
    spawn: int  # the parent's turn after which it begins
    spawned: int  # when that turn ended in the recording
    join: int  # the parent's turn that waits for it
    turn: int = 0
    state: str = "unborn"
    at: int = 0
    asked: int = 0  # order of planning

    def pause(self) -> int:
        return max(0, self.starts[self.turn] - (self.ends[self.turn - 1] if self.turn else self.spawned))


def talks_of(session: Session) -> list[Talk]:
    made: list[Talk] = []

    def add(entries: Sequence[TraceRequest | Subagent], zero: int, parent: int, spawn: int, spawned: int, join: int) -> None:
        own = [entry for entry in entries if isinstance(entry, TraceRequest)]
        starts, ends = [zero + r.at_ns for r in own], [zero + r.at_ns + r.api_ns for r in own]
        number = len(made) if own else parent
        if own:
            made.append(Talk(starts, ends, parent, spawn, spawned, join))
        for place, entry in enumerate(entries):
            if isinstance(entry, Subagent):
                before = sum(isinstance(e, TraceRequest) for e in entries[:place]) if own else 0
                over = zero + entry.end_ns
                joins = [k for k in range(before, len(starts)) if starts[k] + 1_000 >= over]
                since = (before - 1, ends[before - 1] if before else spawned) if own else (spawn, spawned)
                add(entry.entries, zero + entry.at_ns, number, *since, joins[0] if joins else -1)

    add(session.entries, 0, -1, -1, 0, -1)
    return made


@dataclass
class Tree:
    name: str
    talks: list[Talk]
    quota: int
    zero: int
    resumed: bool = True
    from_turn: list[int] = field(default_factory=list)

    def blocked(self, number: int) -> bool:
        """Its next turn waits for a conversation that is not over."""
        talk = self.talks[number]
        return any(t.parent == number and t.join == talk.turn and t.state != "over" for t in self.talks)


def replay(
    sessions: Sequence[Session], lanes: int, answer: Answer, *, tree_cap: int, system_cap: int, until: int = 1 << 62,
    recycle: bool = False, window: tuple[float, float] | None = None, further: int = 0, seed: int = 42,
) -> dict[str, tuple[int, int, bool]]:  # fmt: skip
    """Request -> (sent, ended, whether it was a warm-up). What is in flight at `until` still ends."""
    log: dict[str, tuple[int, int, bool]] = {}
    flying: list[tuple[int, int, Tree, int, bool]] = []  # end, order, tree, conversation, whether it was a primer
    trees: list[Tree] = []
    taken = asked = now = 0
    measuring = stopped = False

    def plan(tree: Tree, number: int, turn: int, at: int) -> None:
        nonlocal asked
        asked += 1
        talk = tree.talks[number]
        talk.turn, talk.at, talk.state, talk.asked = turn, at if measuring else now, "waiting", asked

    def open_tree(quota: int, lane: int | None) -> None:
        nonlocal taken
        if stopped or (taken >= len(sessions) and not recycle):
            return
        play, index = divmod(taken, len(sessions))
        taken += 1
        talks = talks_of(sessions[index])
        tree = Tree(
            f"{sessions[index].id}/{play}", talks, quota, min(t.starts[0] for t in talks), lane is not None or measuring
        )
        tree.from_turn = [0] * len(talks)
        if window is not None and lane is not None:
            last = max(t.starts[-1] for t in talks)
            low, high = (tree.zero + share * (last - tree.zero) for share in window)
            tree.zero = round(low + (high - low) * start_share(seed, sessions[index].id, lane))
            tree.from_turn = [len([s for s in t.starts if s < tree.zero]) for t in talks]
            for talk, turn in zip(talks, tree.from_turn, strict=True):
                if turn == len(talk.starts):
                    talk.state = "over"
        trees.append(tree)
        if lane is None:
            begin(tree)

    def begin(tree: Tree) -> None:
        for number, talk in enumerate(tree.talks):
            parent_turn = tree.from_turn[talk.parent] if talk.parent >= 0 else 0
            if talk.state == "unborn" and talk.spawn < parent_turn:
                plan(tree, number, tree.from_turn[number], now + talk.starts[tree.from_turn[number]] - tree.zero)

    def send(tree: Tree, number: int, turn: int, primer: bool) -> None:
        ends = now + answer(tree.name, number, turn)
        name = f"{tree.name}/{number}/{turn}"
        log[name] = (now, ends, not measuring)
        flying.append((ends, len(log), tree, number, primer))

    def idle_caps(tree: Tree) -> None:
        waiting = [t for n, t in enumerate(tree.talks) if t.state == "waiting" and not tree.blocked(n)]
        if waiting and not any(t.state == "flying" for t in tree.talks):
            excess = max(0, min(t.at for t in waiting) - now - tree_cap)
            for talk in tree.talks:
                talk.at -= excess

    def system_idle_cap() -> None:
        soonest = [t.at for tree in trees for n, t in enumerate(tree.talks) if t.state == "waiting" and not tree.blocked(n)]
        if soonest and not flying:
            excess = max(0, min(soonest) - now - system_cap)
            for talk in (t for tree in trees for t in tree.talks):
                talk.at -= excess

    def hold_back() -> None:
        """While warming up a turn costs quota as soon as it waits for nothing else."""
        ready = [(t.asked, tree, n) for tree in trees for n, t in enumerate(tree.talks) if t.state == "waiting"]
        for _, tree, number in sorted(ready, key=lambda each: each[0]):
            if not tree.blocked(number):
                tree.talks[number].state = "quota" if tree.quota else "held"
                tree.quota -= tree.quota > 0

    def start_clocks() -> None:
        nonlocal measuring
        measuring = True
        pending = [(tree, n, t) for tree in trees for n, t in enumerate(tree.talks) if t.state in ("held", "waiting")]
        for tree, _, talk in pending:
            root = talk.turn == 0 and talk.parent < 0
            talk.at, talk.state = (
                (max(0, talk.starts[talk.turn] - tree.zero) if tree.resumed or root else talk.pause()),
                "waiting",
            )
        soonest = min((t.at for tree, n, t in pending if not tree.blocked(n)), default=0)
        for _, _, talk in pending:
            talk.at = now + max(0, talk.at - soonest)
        for tree in trees:
            idle_caps(tree)
        system_idle_cap()

    for lane in range(lanes):
        open_tree(further, lane)
    primed = [(tree, n) for tree in trees for n, t in enumerate(tree.talks) if t.state != "over" and tree.from_turn[n]]
    for tree, number in primed:
        send(tree, number, tree.from_turn[number] - 1, True)
    priming = True
    while True:
        if priming and not flying:
            priming = False
            for tree in trees:
                begin(tree)
        if not priming and not measuring:
            hold_back()
            for tree, n in [(each, n) for each in trees for n, t in enumerate(each.talks) if t.state == "quota"]:
                tree.talks[n].state = "flying"
                send(tree, n, tree.talks[n].turn, False)
            if not flying:
                start_clocks()
        stopped = stopped or now >= until
        timers = [(max(t.at, now), tree, n) for tree in trees for n, t in enumerate(tree.talks)
                  if t.state == "waiting" and not tree.blocked(n) and measuring and not stopped]  # fmt: skip
        due = min((at for at, _, _ in timers), default=None)
        first = min(flying, key=lambda each: each[:2], default=None)
        if first is None and due is None:
            return log
        if first is None or (due is not None and due < first[0]):
            assert due is not None
            now = due
            if now >= until:
                continue
            for at, tree, number in timers:
                if at == due:
                    tree.talks[number].state = "flying"
                    send(tree, number, tree.talks[number].turn, False)
            continue
        now, _, tree, number, primer = first
        flying.remove(first)
        if primer:
            continue
        talk = tree.talks[number]
        for child, other in enumerate(tree.talks):
            if (other.parent, other.spawn, other.state) == (number, talk.turn, "unborn"):
                plan(tree, child, tree.from_turn[child], 0)
                other.at = now + other.pause()
        if talk.turn + 1 < len(talk.starts):
            plan(tree, number, talk.turn + 1, 0)
            talk.at = now + talk.pause()
        else:
            talk.state = "over"
        if all(t.state == "over" for t in tree.talks):
            trees.remove(tree)
            open_tree(tree.quota, None)
        elif measuring:
            idle_caps(tree)
        if measuring:
            system_idle_cap()
