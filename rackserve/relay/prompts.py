"""What a request asks for, as far as its place depends on it: model, session, and its prompt as a chain of keys.

By tokens the chain equals the one made of the worker's KV events. By text it is a chain over the JSON of the parts of the body
that become the prompt, in the order in which templates put them: an agent's next turn repeats those bytes and adds to them.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

import msgspec

from rackserve.base.errors import RequestError
from rackserve.base.keys import TOKEN_BYTES, CacheNamespace, Chain, extend_chain, prefix
from rackserve.relay.ledger import root_key
from rackserve.text.chat import ChatTemplate
from rackserve.text.numbers import NumberTokenizer
from rackserve.text.prompt_cache import PromptCache, Scope, common_prefix
from rackserve.text.tokenizer import Tokenizer, pack

NUMBERS = "numbers"
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "session-id", "thread-id", "x-correlation-id")
MAX_SESSION = 256
MEMO_BYTES = 64 << 20
HEAD_BYTES = 4096
"""Prompts without a session are taken for one conversation if they agree in so much."""

_Raw = msgspec.Raw
_Prompts = str | list[int | str | list[int]]


class Body(msgspec.Struct):
    """The fields of a request of any dialect that matter here, each as it came."""

    model: _Raw = _Raw()
    stream: _Raw = _Raw()
    messages: _Raw = _Raw()
    prompt: _Raw = _Raw()
    input: _Raw = _Raw()
    system: _Raw = _Raw()
    instructions: _Raw = _Raw()
    tools: _Raw = _Raw()
    cache_salt: _Raw = _Raw()
    session_id: _Raw = _Raw()
    prompt_cache_key: _Raw = _Raw()
    max_tokens: _Raw = _Raw()
    max_completion_tokens: _Raw = _Raw()
    max_output_tokens: _Raw = _Raw()

    @property
    def session(self) -> str:
        return _text(self.session_id) or _text(self.prompt_cache_key)

    @property
    def limit(self) -> int:
        """Most tokens the answer may get, 0 if it does not say."""
        limits = (_number(raw) for raw in (self.max_tokens, self.max_completion_tokens, self.max_output_tokens))
        return next((limit for limit in limits if limit), 0)

    @property
    def text(self) -> bytes:
        """What becomes the prompt, as it was written."""
        parts = (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input)
        return b"\n".join(bytes(part) for part in parts if bytes(part))


_bodies = msgspec.json.Decoder(Body)


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


class _Untold(Exception):
    """The token ids of a prompt cannot be told, for the reason in the text."""


class PromptReader:
    """Reads bodies. May be used from several threads. `fallbacks` counts, by reason, prompts keyed by text although there is a
    tokenizer: who holds those is known only from what was sent.

    adapters  names of models that are adapters on another, which share no cache with it; grows as KV events tell of them
    """

    def __init__(self, tokenizer: str, block_tokens: int) -> None:
        """`tokenizer`: a folder, NUMBERS, or empty for text. Raises FileFormatError naming what lacks in the folder."""
        self._block_tokens = block_tokens
        self._memo: OrderedDict[bytes, tuple[bytes, Chain]] = OrderedDict()
        self._memo_bytes = 0
        self._lock = Lock()
        self._template: ChatTemplate | None = None
        self._cache: PromptCache | None = None
        if tokenizer == NUMBERS:
            self._cache = PromptCache(NumberTokenizer(2**31 - 1))
        elif tokenizer:
            self._cache = PromptCache(Tokenizer.from_folder(Path(tokenizer)))
            self._template = ChatTemplate.from_folder(Path(tokenizer))
        self.fallbacks: Counter[str] = Counter()
        self.adapters: set[str] = set()

    @property
    def is_slow(self) -> bool:
        """Whether reading takes too long for an event loop."""
        return self._cache is not None

    def read(self, raw: bytes, headers: Mapping[str, str]) -> Call:
        """What `raw` asks for. Raises RequestError unless it is a JSON object."""
        try:
            body = _bodies.decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not a JSON object: {error}", code="invalid_json") from error
        model, salt = _text(body.model), _text(body.cache_salt)
        session = (next((name for name in map(headers.get, SESSION_HEADERS) if name), "") or body.session)[:MAX_SESSION]
        if self._cache is not None:
            root = root_key(self._block_tokens, salt, model if model in self.adapters else "")
            try:
                tokens, chain = self._by_tokens(self._cache, body, Scope(root, self._block_tokens, session))
                return Call(model, session, chain, len(tokens) // TOKEN_BYTES, body.limit, True)
            except _Untold as reason:
                with self._lock:
                    self.fallbacks[str(reason)] += 1
        text = body.text
        return Call(model, session, self._by_text(text, model, salt, session), len(text) // TOKEN_BYTES, body.limit)

    def _by_tokens(self, cache: PromptCache, body: Body, scope: Scope) -> tuple[bytes, Chain]:
        """Token ids and keys as the worker makes them. Raises _Untold where only the worker knows."""
        if any(map(bytes, (body.input, body.system, body.instructions))):
            raise _Untold("dialect")
        if bytes(body.tools) not in (b"", b"null", b"[]"):
            raise _Untold("tools")
        prompt = _first_prompt(body.prompt)
        if isinstance(prompt, array):
            tokens = pack(prompt)
            return tokens, extend_chain(b"", scope.root, tokens, scope.block_tokens)
        try:
            if isinstance(prompt, str):
                made = cache.encode(prompt, scope, specials=True)
            elif bytes(body.messages):
                if self._template is None:
                    raise _Untold("no_template")
                messages = msgspec.json.decode(body.messages, type=list[dict[str, object]])
                made = cache.encode(self._template.render(messages), scope)
            else:
                raise _Untold("no_prompt")
        except (RequestError, msgspec.MsgspecError) as error:
            raise _Untold("refused") from error  # the worker will say what is wrong, or knows better
        return made.tokens, made.chain

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


def _first_prompt(raw: _Raw) -> str | array[int] | None:
    """The first prompt of a completion: text, or token ids. None if there is none to be read."""
    try:
        prompt = msgspec.json.decode(raw, type=_Prompts)
    except msgspec.MsgspecError:
        return None
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(first, str):
        return first
    numbers = first if isinstance(first, list) else prompt
    try:
        return array("i", [number for number in numbers if isinstance(number, int)])
    except OverflowError:
        return None


def _text(raw: _Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.MsgspecError:
        return ""


def _number(raw: _Raw) -> int:
    try:
        return max(0, msgspec.json.decode(raw, type=int))
    except msgspec.MsgspecError:
        return 0
