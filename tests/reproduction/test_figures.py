from __future__ import annotations

import pytest

from rackserve.base.errors import FileFormatError
from rackserve.reproduction.figures import published


def test_every_figure_has_a_source_and_enough_are_held_out() -> None:
    figures = published()
    assert all(figure.source and figure.what and figure.unit for figure in figures.values())
    assert sum(figure.role == "held-out" for figure in figures.values()) >= 8


@pytest.mark.parametrize(
    "table",
    [
        b"not toml",
        b"[sources]\n[figures.a]\nwhat='a'\nvalue=1\nunit='s'\nsource='nobody'\nrole='input'\n",
        b"[sources]\nx='x'\n[figures.a]\nwhat='a'\nvalue=1\nunit='s'\nsource='x'\nrole='guessed'\n",
    ],
)
def test_a_wrong_table_is_refused(table: bytes) -> None:
    with pytest.raises(FileFormatError, match=r"published\.toml"):
        published(table)
