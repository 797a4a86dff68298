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
