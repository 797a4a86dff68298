"""Who may ask: keys by their digests, each for a tenant, and the salt under which a tenant's cache is kept."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from rackserve.api.call import Caller
from rackserve.base.errors import ConfigError, FileFormatError

KEY_PREFIX = "rk-"

KEY_VARIABLE = "RACKSERVE_API_KEY"
"""Where a server finds its one key, and a client's command the key that it sends."""


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key in a key file. sha256: of the key, in hex, so that the file gives no key away.

    tenant  whose cache its requests use; keys of one tenant share
    admin   may use routes under /admin/, of which there is none yet
    """

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, Meta(max_length=200)] = ""
    admin: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeyEntry]


class KeyRing:
    """The keys of a server; without any, everyone is let in as the only tenant."""

    __slots__ = ("_entries", "_key_file", "_single")

    def __init__(self, entries: list[KeyEntry]) -> None:
        self._key_file = self._single = ""
        self._take(entries)

    def _take(self, entries: list[KeyEntry]) -> None:
        names = [entry.name for entry in entries]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(f"two keys are named {double!r}; give each its own name")
        self._entries = [(entry.sha256.encode(), entry) for entry in entries]

    @classmethod
    def open(cls, key_file: str, single: str = "") -> KeyRing:
        """The keys in a file, and one more that was given by itself; that one is an admin's.

        Raises FileFormatError naming the file, or ConfigError.
        """
        ring = cls(_entries(key_file, single))
        ring._key_file, ring._single = key_file, single
        return ring

    def reload(self) -> frozenset[str]:
        """Read the key file again; the names of keys that are not what they were. Whoever was let in before stays in.

        Raises FileFormatError naming the file, or ConfigError; then all is as before, as it is for a file without keys.
        """
        entries = _entries(self._key_file, self._single)
        if self and not entries:
            raise ConfigError(f"{self._key_file}: without any key everyone would be let in; the keys stay as they were")
        before = {entry for _, entry in self._entries}
        self._take(entries)
        return frozenset(entry.name for entry in before.difference(entries))

    def __len__(self) -> int:
        """How many there are."""
        return len(self._entries)

    def find(self, key: str) -> Caller | None:
        """Whose key this is. Takes the same time whichever key it is, and whether or not it is one."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest().encode()
        found: Caller | None = None
        for known, entry in self._entries:
            if hmac.compare_digest(known, digest):
                found = Caller(entry.tenant, entry.admin, entry.name)
        return found


def _entries(key_file: str, single: str) -> list[KeyEntry]:
    entries = _read(Path(key_file)) if key_file else []
    if single:
        entries.append(KeyEntry("given", hashlib.sha256(single.encode()).hexdigest(), admin=True))
    return entries


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request carries, where clients of all dialects put it; "" if none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key", "")


def new_key(name: str, tenant: str = "", *, admin: bool = False) -> tuple[str, str]:
    """A fresh key, and its entry for a key file."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    entry = KeyEntry(name, hashlib.sha256(key.encode()).hexdigest(), tenant, admin)
    lines = ["[[keys]]", f"name = {_quoted(entry.name)}", f'sha256 = "{entry.sha256}"', f"tenant = {_quoted(tenant)}"]
    return key, "\n".join([*lines, f"admin = {str(admin).lower()}"]) + "\n"


def salt_of(secret: bytes, tenant: str, asked: str) -> str:
    """The cache salt of a request: what the client asked for only narrows its tenant's, and names neither.

    Without tenant and wish it is empty: everybody shares. No two pairs give the same, as lengths are part of it.
    """
    if not tenant and not asked:
        return ""
    parts = (tenant.encode(), asked.encode())
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _read(path: Path) -> list[KeyEntry]:
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).keys
    except (OSError, ValueError) as error:  # includes what msgspec and tomllib raise
        raise FileFormatError(f"{path}: cannot be read as a key file ({error}); `rackserve key` prints an entry") from error
