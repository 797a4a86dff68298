"""Who may use the router, and as whom the router comes to the workers: its own keys end here, theirs begin here."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from rackserve.api.guard import keys_at, names_at
from rackserve.api.keys import KEY_VARIABLE, KeyRing
from rackserve.relay.config import RouteConfig

WORKER_KEY_VARIABLE = "RACKSERVE_WORKER_KEY"


class Door:
    """Keys of both sides. Without any, what a client sends as its key goes on to the workers, which may check it.

    keys         whom the router lets in; none: everyone
    hosts        names under which it may be addressed; empty: any
    secret       what cache salts of tenants are derived with; caches of workers know them until the router ends
    kept_back    names of headers that do not go on to a worker
    for_workers  headers that every worker gets
    """

    __slots__ = ("for_workers", "hosts", "kept_back", "keys", "secret")

    def __init__(self, keys: KeyRing | None = None, worker_key: str = "", hosts: frozenset[str] = frozenset()) -> None:
        self.keys = keys or KeyRing([])
        self.hosts = hosts
        self.secret = secrets.token_bytes(32)
        ends_here = bool(self.keys) or bool(worker_key)
        self.kept_back = frozenset({b"authorization", b"x-api-key", b"cookie"}) if ends_here else frozenset()
        self.for_workers = [(b"authorization", f"Bearer {worker_key}".encode())] if worker_key else []

    @classmethod
    def open(cls, config: RouteConfig, environment: Mapping[str, str]) -> Door:
        """The door that settings and environment tell of. Raises as `keys_at`."""
        security = config.security
        keys = keys_at(config.host, security.key_file, environment.get(KEY_VARIABLE, ""), keyless=security.keyless)
        return cls(keys, environment.get(WORKER_KEY_VARIABLE, ""), names_at(config.host, security.hosts))
