"""One self-contained page: inline style, script and drawings; nothing is loaded from anywhere."""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
SCRIPT = (Path(__file__).parent / "report.js").read_text(encoding="utf-8")


def page(title: str, subtitle: str, body: str) -> str:
    """The whole page; `body` is HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    top = f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>"
    inside = f"<main>{top}{body}</main><script>{SCRIPT}</script>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{inside}</body></html>\n'
