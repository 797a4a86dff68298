"""What a request asks for, as far as its place depends on it: model, session, and its prompt as a chain of keys.

By tokens the chain equals the one made of the worker's KV events. By text it is a chain over the JSON of the parts of the body
that become the prompt, in the order in which templates put them: an agent's next turn repeats those bytes and adds to them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from threading import Lock

import msgspec

from rackserve.api.dialects.openai import MAX_SESSION_CHARACTERS, SESSION_HEADERS
from rackserve.base.errors import RequestError
from rackserve.base.keys import TOKEN_BYTES, CacheNamespace, Chain, extend_chain, prefix
from rackserve.relay.ledger import root_key
from rackserve.relay.rendering import DIALECTS, Fields, Rendering, Untold
from rackserve.text.prompt_cache import Scope
from rackserve.text.prompt_text import common_prefix

MEMO_BYTES = 64 << 20
HEAD_BYTES = 4096
"""Prompts without a session are taken for one conversation if they agree in so much."""

PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
"""What becomes the prompt, in the order in which templates put it."""

LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class _Metadata(msgspec.Struct):
    user_id: str | None = None


_fields = msgspec.json.Decoder(Fields)
_metadata = msgspec.json.Decoder(_Metadata)


class Call(msgspec.Struct, frozen=True):
    """One request.

    chain       keys of its prompt's full blocks
    tokens      length of its prompt; four bytes of text count as one where it is keyed by text
    max_tokens  most tokens its answer may get, 0 if it does not say
    by_tokens   whether `chain` is over token ids, so that KV events can match it
    """

    model: str
    session: str
    chain: Chain
    tokens: int
    max_tokens: int = 0
    by_tokens: bool = False


class PromptReader:
    """Reads bodies. May be used from several threads. `fallbacks` counts, by reason, prompts keyed by text although there is a
    tokenizer: who holds those is known only from what was sent.

    adapters  names of models that are adapters on another, which share no cache with it; grows as KV events tell of them
    """

    def __init__(self, block_tokens: int, rendering: Rendering | None = None) -> None:
        """`rendering`: how token ids are told; without it prompts are keyed by text."""
        self._block_tokens = block_tokens
        self._rendering = rendering
        self._memo: OrderedDict[bytes, tuple[bytes, Chain]] = OrderedDict()
        self._memo_bytes = 0
        self._lock = Lock()
        self.fallbacks: Counter[str] = Counter()
        self.adapters: set[str] = set()

    @property
    def is_slow(self) -> bool:
        """Whether reading takes too long for an event loop."""
        return self._rendering is not None

    def read(self, path: str, raw: bytes, headers: Mapping[str, str]) -> Call:
        """What `raw` asks for of `path`. Raises RequestError unless it is a JSON object."""
        fields = fields_of(raw)
        model, salt = text_of(fields, "model"), text_of(fields, "cache_salt")
        session = _session(path, fields, headers)
        if path not in DIALECTS:  # nothing is generated, so no cache is read or filled
            return Call(model, session, b"", 0)
        limit = next((limit for limit in (_number(fields, name) for name in LIMIT_FIELDS) if limit), 0)
        if self._rendering is not None:
            root = root_key(self._block_tokens, salt, model if model in self.adapters else "")
            try:
                tokens, chain = self._rendering.tokens(path, fields, Scope(root, self._block_tokens, session))
                return Call(model, session, chain, len(tokens) // TOKEN_BYTES, limit, True)
            except Untold as reason:
                with self._lock:
                    self.fallbacks[str(reason)] += 1
        text = b"\n".join(bytes(fields[name]) for name in PROMPT_FIELDS if name in fields)
        return Call(model, session, self._by_text(text, model, salt, session), len(text) // TOKEN_BYTES, limit)

    def _by_text(self, text: bytes, model: str, salt: str, session: str) -> Chain:
        """Keys of `text`; what a prompt of the same conversation had in common with it is not hashed again."""
        root = CacheNamespace(model, "", self._block_tokens, "relay-text", salt).root()
        name = root + (session.encode(errors="replace") or text[:HEAD_BYTES])
        with self._lock:
            before, known = self._memo.get(name, (b"", b""))
        if known:
            shared = common_prefix(before, text) // (self._block_tokens * TOKEN_BYTES)
            known = prefix(known, shared)
        chain = extend_chain(known, root, text, self._block_tokens)
        with self._lock:
            self._memo_bytes += len(text) - len(self._memo.pop(name, (b"",))[0])
            self._memo[name] = text, chain
            while self._memo_bytes > MEMO_BYTES:
                self._memo_bytes -= len(self._memo.popitem(last=False)[1][0])
        return chain


def fields_of(raw: bytes) -> Fields:
    """A body's fields, each as it was written. Raises RequestError unless it is an object."""
    try:
        return _fields.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not a JSON object: {error}", code="invalid_json") from error


def _session(path: str, fields: Fields, headers: Mapping[str, str]) -> str:
    """The conversation, wherever the client named it; "" if nowhere."""
    named = text_of(fields, "session_id") or next((name for name in map(headers.get, SESSION_HEADERS) if name), "")
    if not named:
        named = _user(fields) if path == "/v1/messages" else text_of(fields, "prompt_cache_key")
    return named[:MAX_SESSION_CHARACTERS]


def _user(fields: Fields) -> str:
    try:
        return _metadata.decode(fields.get("metadata", b"null")).user_id or ""
    except msgspec.MsgspecError:
        return ""


def text_of(fields: Fields, name: str) -> str:
    """The text in a field; "" if there is none."""
    try:
        return msgspec.json.decode(fields.get(name, b"null"), type=str)
    except msgspec.MsgspecError:
        return ""


def _number(fields: Fields, name: str) -> int:
    try:
        return max(0, msgspec.json.decode(fields.get(name, b"null"), type=int))
    except msgspec.MsgspecError:
        return 0
