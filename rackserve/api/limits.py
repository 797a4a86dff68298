"""What one client may ask of the front end before anything heavy is done."""

from __future__ import annotations

import msgspec

from rackserve.base.ranges import MAX_COUNT, MAX_SECONDS, MIN_SECONDS, require_range

MAX_BODY_BYTES = 1 << 40
MAX_THREADS = 1024


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may ask of the front end before anything heavy is done.

    body_bytes      length of a request body; more is 413
    messages        chat messages in one request
    choices         prompts x n in one request
    preparing       requests waiting to be parsed and tokenised; more are refused with 429
    tenant_requests open calls of one tenant; more are refused with 429
    threads         worker threads that parse and tokenise
    body_s, send_s  seconds to wait for the next part of a body, or for the client to take a part of the answer
    """

    body_bytes: int = 16 << 20
    messages: int = 8192
    choices: int = 32
    preparing: int = 64
    tenant_requests: int = 10_000
    threads: int = 2
    body_s: float = 30.0
    send_s: float = 60.0

    def __post_init__(self) -> None:
        require_range("limits", self, ("body_bytes",), 1, MAX_BODY_BYTES)
        require_range("limits", self, ("messages", "choices", "preparing", "tenant_requests"), 1, MAX_COUNT)
        require_range("limits", self, ("threads",), 1, MAX_THREADS)
        require_range("limits", self, ("body_s", "send_s"), MIN_SECONDS, MAX_SECONDS)
