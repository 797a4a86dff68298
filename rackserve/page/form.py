"""The form that asks a person for a key, where a program would get an error."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from starlette.datastructures import Headers

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;margin:12vh auto;max-width:22rem;padding:0 1rem}"
    "label,input,button{display:block;width:100%;box-sizing:border-box;font:inherit}"
    "input,button{padding:.5rem .7rem;margin:.4rem 0}"
    "p{margin:.6rem 0}.wrong{font-weight:600}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

FORM_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-store",
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def form(problem: str = "") -> bytes:
    """The page that asks for a key; `problem` is what to say above it."""
    told = f'<p class="wrong" role="alert">{escape(problem)}</p>' if problem else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>rackserve: sign in</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><main><h1>rackserve</h1>{told}'
        '<form method="post" action="/login"><label for="key">API key</label>'
        '<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>'
        "<button>Sign in</button></form>"
        "<p>The key stays with the server; this browser gets a cookie that ends after twelve hours.</p></main></body></html>"
    ).encode()


def asks_for_page(method: str, path: str, headers: Headers) -> bool:
    """Whether a refusal should be a form for a person, not an error for a program."""
    return method in ("GET", "HEAD") and path == "/" and "text/html" in headers.get("accept", "")
