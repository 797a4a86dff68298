"""The documentation names what exists: files, links, targets of the Makefile, settings, metrics, laws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rackserve.api.metrics import Metrics
from rackserve.config import Settings
from rackserve.route.placement import POLICIES

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
CODE_NAME = re.compile(r"`((?:rackserve|tests|docs|scripts|benchmarks)/[\w./-]*)`")
PACKAGE_NAME = re.compile(r"`((?:base|kv|sched|route|pool|nodes|sim|live|model|text|api|bench|report)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_link_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = [ROOT / name for name in CODE_NAME.findall(text)]
    named += [ROOT / "rackserve" / name for name in PACKAGE_NAME.findall(text)]
    named += [page.parent / target for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)]
    assert [str(path) for path in named if not path.exists()] == []


def test_every_make_target_that_a_page_names_is_one() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"(?:`|^)make (\w+)", text, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_operations_lists_every_metric_and_no_other() -> None:
    section = OPERATIONS.split("## Metrics")[1].split("\n## ")[0]
    first_column = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    listed = set(re.findall(r"`(\w+)`", first_column))
    text = Metrics().exposition().decode()
    assert listed == set(re.findall(r"^# TYPE rackserve_(\w+) ", text, re.MULTILINE))


def test_operations_lists_every_section_of_settings_and_every_policy() -> None:
    section = OPERATIONS.split("## Settings")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == set(Settings.__struct_fields__)
    policies = next(line for line in section.splitlines() if line.startswith("Policies:"))
    assert set(re.findall(r"`(\w+)`", policies)) == set(POLICIES)


def test_the_page_of_laws_has_thirteen() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| I(\d+) ", text, re.MULTILINE) == [str(number) for number in range(1, 14)]


def test_every_law_an_error_names_is_on_the_page() -> None:
    named = set()
    for path in (ROOT / "rackserve").rglob("*.py"):
        named |= set(re.findall(r"\(I(\d+)\)", path.read_text(encoding="utf-8")))
    assert named and all(1 <= int(number) <= 13 for number in named)
