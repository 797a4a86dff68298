"""What SECURITY.md promises of the code as a whole."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rackserve.api.guard import OPEN

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "rackserve").rglob("*.py"))
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")

RUN_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
"""Modules that run what they read."""


def _turns_data_into_code(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.partition(".")[0] in RUN_DATA]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in RUN_DATA:
                found.append(module)
            case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" | "__import__" as name)):
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                found.append("torch.load")
            case ast.Call(func=ast.Attribute(attr="unsafe_load" | "full_load" | "send_pyobj" | "recv_pyobj" as name)):
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load"), args=args):
                if not (len(args) == 2 and isinstance(args[1], ast.Name) and args[1].id == "_Loader"):
                    found.append("yaml.load without our safe loader")
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.append("allow_pickle")
    return found


def test_no_module_turns_data_into_code() -> None:
    assert len(MODULES) > 100
    found = {str(path.relative_to(ROOT)): _turns_data_into_code(ast.parse(path.read_text("utf-8"))) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from marshal import loads", "eval(x)", "torch.load(p)", "yaml.load(t)", "np.load(p, allow_pickle=True)"],
)
def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert _turns_data_into_code(ast.parse(line))


LISTENS = {"bind", "create_server", "start_server", "start_unix_server", "create_unix_server", "Pipe", "Listener", "socketpair"}
"""Calls by which a process can be reached by others."""

SOCKETS = {
    "api/server.py": "tests/api/test_server.py",
    "live/transport.py": "tests/live/test_hostile.py",
    "live/kv_events.py": "tests/live/test_hostile.py",
    "live/group.py": "",  # a pair of sockets without a name, between a process and its child
    "model/deepseek_v41/engram/sockets.py": "tests/model/deepseek_v41/engram/test_sockets.py",
    "doctor.py": "",  # to see whether it could; closed before anybody could connect
}
"""Modules that listen, and where junk is thrown at what they listen on."""


def _listens(tree: ast.AST) -> bool:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    return bool(LISTENS & (names | {call.id for call in calls if isinstance(call, ast.Name)}))


def test_every_socket_that_others_can_reach_is_on_the_list_of_those_at_which_junk_is_thrown() -> None:
    found = {str(path.relative_to(ROOT / "rackserve")) for path in MODULES if _listens(ast.parse(path.read_text("utf-8")))}
    assert found == set(SOCKETS)
    for path in filter(None, SOCKETS.values()):
        assert "junk" in (ROOT / path).read_text("utf-8"), f"{path} throws nothing"


@pytest.mark.parametrize("line", ["s.bind(a)", "await asyncio.start_server(f)", "Pipe()", "socket.create_server(a)"])
def test_the_search_finds_who_listens(line: str) -> None:
    assert _listens(ast.parse(line)) and not _listens(ast.parse("s.connect(a)"))


def test_every_test_that_the_table_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) > 20
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{path} has no {name}"


def test_the_paths_without_a_key_are_those_that_are_written() -> None:
    listed = re.search(r"without a key: (.*?)\.\n", TEXT, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(GET|POST) (/\w+)`", listed[1])) == set(OPEN)
