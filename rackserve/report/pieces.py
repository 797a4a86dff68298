"""What every part of a page is made of: legends, figures, and tables that can be saved as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def legend(names: Sequence[str], prefix: str, colours: Sequence[int] = ()) -> str:
    """Colours `prefix`0, `prefix`1, ... (or `colours`) and what they stand for."""
    numbers = colours or range(len(names))
    pairs = zip(numbers, names, strict=True)
    items = "".join(f'<li><i class="{prefix}{number % 6}"></i>{escape(name)}</li>' for number, name in pairs)
    return f'<ul class="legend">{items}</ul>'


def figure(title: str, drawing: str, note: str = "", names: str = "", look: str = "") -> str:
    """A drawing under its title; `names` is its legend, `look` a class of the page."""
    kind = f' class="{look}"' if look else ""
    return f"<figure{kind}><figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>{names}{drawing}</figure>"


def table_frame(name: str, inside: str, shape: str = "scroll fit") -> str:
    """A table around `inside`; the page's script gives it a button that saves it as `name`.csv."""
    return f'<div class="{shape}"><table data-name="{escape(name)}">{inside}</table></div>'


def data_table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """A table of plain cells, of which the first `texts` columns are words."""
    head = "".join(f"<th{_kind(i, texts)}>{escape(text)}</th>" for i, text in enumerate(heads))
    lines = ("".join(f"<td{_kind(i, texts)}>{escape(cell)}</td>" for i, cell in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return table_frame(name, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")


def _kind(column: int, texts: int) -> str:
    return ' class="words"' if column < texts else ""
