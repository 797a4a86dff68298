"""The floors: imports only downward, no clock below the hosts, torch behind live, and a mirror test for every module.

The rules are functions over (path, source), so that each can be shown a violation.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rackserve

Rule = Callable[[str, str], list[str]]
"""(path inside the package, source) -> violations found."""

PACKAGE = Path(rackserve.__file__).parent
TESTS = Path(__file__).parent

FLOORS = {
    "base": 0, "ports": 1, "runs": 1, "digest_model": 1,
    "kv": 2, "sched": 2, "route": 2, "pool": 2,
    "nodes": 3, "assemble": 3,
    "sim": 4, "live": 4, "model": 4, "kernels": 4, "text": 4,
}  # fmt: skip
"""Rooms and single modules by floor; whatever is not listed is an entry point on floor 5."""

ENTRY = 5
SIDEWAYS = {
    ("sched", "kv"), ("assemble", "nodes"), ("live", "model"), ("live", "kernels"), ("live", "text"), ("model", "kernels"),
}  # fmt: skip
"""Imports within one floor that are allowed. On floor 5 entry points may use each other."""

CLOCKS = {"time", "random", "uuid", "asyncio", "threading", "socket", "logging", "os"}
"""Modules banned on floors 0-3 (`os` because of `os.environ`)."""

TORCH = {"model", "kernels"}
TORCH_MODULES = {"live/engine_main.py", "live/engine.py", "live/runner.py"}

MAX_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_DOCSTRING_LINES = 10


def room_of(path: str) -> str:
    """First part of a path such as `kv/arena.py` or `assemble.py`."""
    return path.split("/")[0].removesuffix(".py")


def floor_of(room: str) -> int:
    return FLOORS.get(room, ENTRY)


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import anywhere in the file, `TYPE_CHECKING` blocks and functions included."""
    parents = ["rackserve", *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names if module == "rackserve")


def upward(path: str, source: str) -> list[str]:
    """Imports of a higher floor, of a neighbour, or of the other host."""
    room, found = room_of(path), []
    for line, module in imports(path, source):
        parts = module.split(".")
        if parts[0] != "rackserve" or len(parts) < 2:
            continue
        other = parts[1]
        if other == room or floor_of(other) < floor_of(room) or (room, other) in SIDEWAYS:
            continue
        if floor_of(room) == floor_of(other) == ENTRY and {room, other} & FLOORS.keys() == set():
            continue
        if not (PACKAGE / other).exists() and not (PACKAGE / f"{other}.py").exists():
            continue  # a name of the package itself, such as __version__
        found.append(f"{path}:{line}: {room} (floor {floor_of(room)}) imports {other} (floor {floor_of(other)})")
    return found


def banned(path: str, source: str) -> list[str]:
    """Clocks, chance, environment, logging and process-dependent values on floors 0-3; torch outside its rooms."""
    low, found = floor_of(room_of(path)) <= 3, []
    for line, module in imports(path, source):
        top = module.split(".")[0]
        if low and top in CLOCKS:
            found.append(f"{path}:{line}: {top} on floor {floor_of(room_of(path))}")
        if top == "torch" and room_of(path) not in TORCH and path not in TORCH_MODULES:
            found.append(f"{path}:{line}: torch outside model/, kernels/ and live's engine")
    if low:
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        names = ((call.lineno, call.func.id) for call in calls if isinstance(call.func, ast.Name))
        found += [f"{path}:{line}: {name}() differs between processes" for line, name in names if name in ("hash", "id")]
    return found


def too_long(path: str, source: str) -> list[str]:
    """Files and functions beyond the limits."""
    found = [f"{path}: {len(source.splitlines())} lines"] if len(source.splitlines()) > MAX_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


def undocumented(path: str, source: str) -> list[str]:
    """Modules, public classes and packages without a docstring; package docstrings that are too long."""
    tree, found = ast.parse(source), []
    text = ast.get_docstring(tree)
    if not text:
        found.append(f"{path}: no docstring")
    elif path.endswith("__init__.py") and len(text.splitlines()) > MAX_DOCSTRING_LINES:
        found.append(f"{path}: a package docstring of {len(text.splitlines())} lines")
    bare = (node for node in tree.body if isinstance(node, ast.ClassDef) and not ast.get_docstring(node))
    return found + [f"{path}:{node.lineno}: {node.name} has no docstring" for node in bare if not node.name.startswith("_")]


def mirror_of(path: str) -> str:
    """Where the test of a module lives: `kv/arena.py` -> `kv/test_arena.py`."""
    room, _, name = path.rpartition("/")
    return f"{room}/test_{name}" if room else f"test_{name}"


FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_the_house_rules_hold(path: str) -> None:
    source = (PACKAGE / path).read_text()
    rules = (upward, banned, too_long, undocumented)
    assert [found for rule in rules for found in rule(path, source)] == []


@pytest.mark.parametrize("path", [path for path in FILES if not path.endswith(("__init__.py", "__main__.py"))])
def test_every_module_has_a_mirror_test(path: str) -> None:
    assert (TESTS / mirror_of(path)).exists(), f"tests/{mirror_of(path)} is missing"


def test_every_package_has_a_docstring() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


VIOLATIONS: list[tuple[Rule, str, str]] = [
    (upward, "base/keys.py", "from rackserve.kv.arena import Arena"),
    (upward, "kv/arena.py", "from rackserve.sched.queue import ORDERS"),
    (upward, "route/load.py", "from rackserve.pool.planner import plan_fetch"),
    (upward, "kv/arena.py", "from ..nodes import worker"),
    (
        upward,
        "nodes/worker.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rackserve.sim.host import SimHost",
    ),
    (upward, "nodes/worker.py", "def late():\n    import rackserve.live.host"),
    (upward, "sim/host.py", "from rackserve.live.host import LiveHost"),
    (upward, "live/host.py", "from rackserve import sim"),
    (upward, "model/config.py", "from rackserve.live.host import LiveHost"),
    (upward, "sim/host.py", "from rackserve.api.http import create_app"),
    (upward, "text/chat.py", "import rackserve.cli"),
    (upward, "nodes/router.py", "from rackserve.assemble import RackConfig"),
    (banned, "base/rng.py", "import random"),
    (banned, "kv/arena.py", "from time import monotonic"),
    (banned, "nodes/worker.py", "import asyncio"),
    (banned, "assemble.py", "from os import environ"),
    (banned, "sched/queue.py", "key = hash('x')"),
    (banned, "runs/tree.py", "where = id(object())"),
    (banned, "sim/engine.py", "import torch"),
    (banned, "live/host.py", "from torch import nn"),
    (too_long, "sim/engine.py", "x = 1\n" * (MAX_LINES + 1)),
    (too_long, "sim/engine.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (undocumented, "kv/__init__.py", ""),
    (undocumented, "kv/__init__.py", '"""' + "line\n" * 11 + '"""'),
    (undocumented, "kv/arena.py", '"""Doc."""\nclass Arena:\n    pass'),
]


@pytest.mark.parametrize(("rule", "path", "source"), VIOLATIONS)
def test_a_planted_violation_is_caught(rule: Rule, path: str, source: str) -> None:
    assert len(rule(path, source)) == 1


ALLOWED: list[tuple[Rule, str, str]] = [
    (upward, "sched/scheduler.py", "from rackserve.kv.rank_cache import RankCache"),
    (upward, "live/engine_main.py", "from rackserve.model.runner import Runner"),
    (upward, "cli.py", "from rackserve.api.http import create_app"),
    (upward, "kv/arena.py", "from rackserve.base import ids\nfrom . import rank_cache"),
    (banned, "live/host.py", "import asyncio, time"),
    (banned, "model/llama.py", "import torch"),
    (banned, "base/keys.py", "class A:\n    id: str = ''\n    def hash(self): ..."),
]


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_what_is_allowed_is_not_reported(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source) == []


def test_mirrors_are_named_after_their_module() -> None:
    assert mirror_of("kv/arena.py") == "kv/test_arena.py"
    assert mirror_of("model/loader/gguf.py") == "model/loader/test_gguf.py"
    assert mirror_of("assemble.py") == "test_assemble.py"
