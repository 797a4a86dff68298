"""How an owner of rows and a link prove to each other that they know one secret, before either believes a byte of the other.

The owner begins with CHALLENGE, its magic and a nonce. The link answers with a nonce and a proof over both nonces; the owner,
if that is right, with a proof of its own. Nonces are used once, so what was overheard proves nothing later. What follows is
neither encrypted nor signed: who can change traffic on the way can change rows.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from pathlib import Path

from rackserve.base.errors import ConfigError

MAGIC = b"rs-auth1"
NONCE_BYTES = 32
PROOF_BYTES = 32
LEAST_SECRET = 32

CHALLENGE = struct.Struct(f"<8s{NONCE_BYTES}s")
ANSWER = struct.Struct(f"<{NONCE_BYTES}s{PROOF_BYTES}s")


def read_secret(path: str) -> bytes:
    """The secret in a file, without white space around it. ConfigError if others may read the file, or it is short."""
    try:
        mode, secret = Path(path).stat().st_mode, Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path}: the secret cannot be read ({error.strerror})") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: others than its owner may open this secret; chmod 600 {path}")
    if len(secret) < LEAST_SECRET:
        told = f"at least {LEAST_SECRET} bytes, this one {len(secret)}; head -c 32 /dev/urandom | base64 makes one"
        raise ConfigError(f"{path}: a secret has {told}")
    return secret


def challenge_link(peer: socket.socket, secret: bytes) -> bool:
    """The owner's side: whether `peer` knows the secret; it is told that we do. OSError or EOFError if it goes."""
    ours = secrets.token_bytes(NONCE_BYTES)
    peer.sendall(CHALLENGE.pack(MAGIC, ours))
    theirs, proof = ANSWER.unpack(receive(peer, ANSWER.size))
    if not hmac.compare_digest(proof, _proof(secret, b"link", ours, theirs)):
        return False
    peer.sendall(_proof(secret, b"owner", ours, theirs))
    return True


def answer_owner(peer: socket.socket, secret: bytes, nonce: bytes) -> bool:
    """The link's side, after the owner's CHALLENGE: whether the owner knows the secret. OSError or EOFError if it goes."""
    ours = secrets.token_bytes(NONCE_BYTES)
    peer.sendall(ANSWER.pack(ours, _proof(secret, b"link", nonce, ours)))
    return hmac.compare_digest(receive(peer, PROOF_BYTES), _proof(secret, b"owner", nonce, ours))


def receive(peer: socket.socket, size: int) -> bytes:
    """The next `size` bytes, a few. EOFError if the other side has closed."""
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise EOFError("closed")
        data += part
    return data


def _proof(secret: bytes, who: bytes, owner_nonce: bytes, link_nonce: bytes) -> bytes:
    return hmac.digest(secret, who + owner_nonce + link_nonce, "sha256")
