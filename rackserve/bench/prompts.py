"""Prompts for recorded requests: equal hash ids of one play of a session give equal tokens, all else differs."""

from __future__ import annotations

from hashlib import shake_128

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.keys import TOKEN_BYTES, CacheNamespace, Chain, extend_chain, prefix
from rackserve.base.request import Request
from rackserve.bench.plan import Send
from rackserve.bench.session import HASH_ID_BYTES, shared_ids


class _Last(msgspec.Struct, frozen=True):
    """The previous prompt of a stream: what the next one shares with it is not made again."""

    ids: bytes
    tokens: bytes
    chain: Chain


class RequestMaker:
    """Makes the `Request` of a `Send`.

    A token is a function of (seed, salt, session, play, hash id, offset in the block), drawn from `vocabulary` = [low, high);
    where a trace shares its ids, of the play alone instead of session and play. The play number is the cache-bust marker: it
    changes every block, so a repeated session starts cold; a `salt` of its own does the same for a repeated run. Prompt tokens
    beyond the last full trace block have no id and are drawn for their request alone; they never hit.

    With `with_tokens` off (simulation) `Request.tokens` stays empty and the chain is made from the ids; hits are the same if
    a served block is a whole number of trace blocks, which is required then.
    """

    __slots__ = ("_last", "_name", "_namespace", "_salt", "_vocabulary", "_with_tokens")

    def __init__(
        self,
        namespace: CacheNamespace,
        *,
        vocabulary: tuple[int, int] = (0, 256),
        seed: int = 42,
        salt: str = "",
        with_tokens: bool = True,
    ) -> None:
        if not 0 <= vocabulary[0] < vocabulary[1]:
            raise ConfigError(f"vocabulary must be a range low < high of token ids, got {vocabulary}")
        self._namespace = namespace
        self._vocabulary = vocabulary
        self._name = f"{seed}/{salt}" if salt else str(seed)
        self._salt = salt  # runs share no prompts, so no sessions either
        self._with_tokens = with_tokens
        self._last: dict[tuple[str, int], _Last] = {}

    def make(self, send: Send) -> Request:
        """The request as a client would send it: output length forced to the recorded one, end-of-sequence ignored."""
        stream = (send.key.tree, send.key.stream)
        last = self._last.pop(stream, None) or _Last(b"", b"", b"")
        made = self._from_tokens(send, last) if self._with_tokens else self._from_ids(send, last)
        if not send.last:
            self._last[stream] = made
        return Request(
            id=str(send.key),
            session=f"{send.key.tree}/{self._salt}" if self._salt else send.key.tree,
            tokens=made.tokens,
            chain=made.chain,
            num_tokens=send.request.input_tokens,
            max_tokens=send.request.output_tokens,
            ignore_eos=True,
            root=self._namespace.root() if made.tokens else b"",
        )

    def _from_tokens(self, send: Send, last: _Last) -> _Last:
        ids, size = send.request.hash_ids, send.block_tokens
        shared = shared_ids(ids, last.ids)
        head = last.tokens[: shared * size * TOKEN_BYTES]
        scope = send.scope
        parts = [self._draw(f"{scope}/{number}", size) for number in memoryview(ids).cast("i")[shared:]]
        spare = send.request.input_tokens - len(ids) // HASH_ID_BYTES * size
        tokens = b"".join((head, *parts, self._draw(f"{send.key}/spare", spare)))
        served = self._namespace.block_tokens
        kept = prefix(last.chain, shared * size // served)
        return _Last(ids, tokens, extend_chain(kept, self._namespace.root(), tokens, served))

    def _from_ids(self, send: Send, last: _Last) -> _Last:
        ratio, rest = divmod(self._namespace.block_tokens, send.block_tokens)
        if rest:
            raise ConfigError(
                f"block_tokens {self._namespace.block_tokens} must be a multiple of the trace's block of {send.block_tokens} "
                "tokens when prompts carry no tokens; scale the trace or change block_tokens"
            )
        salt = f"{self._namespace.tenant_salt}/{self._name}/{send.scope}"
        root = msgspec.structs.replace(self._namespace, tenant_salt=salt).root()
        ids = send.request.hash_ids
        kept = prefix(last.chain, shared_ids(ids, last.ids) // ratio)
        return _Last(ids, b"", extend_chain(kept, root, ids, ratio))

    def _draw(self, name: str, count: int) -> bytes:
        """`count` int32 token ids that are a function of the seed and `name`."""
        low, high = self._vocabulary
        raw = memoryview(shake_128(f"{self._name}/{name}".encode()).digest(count * 4)).cast("I")
        return b"".join((low + value % (high - low)).to_bytes(TOKEN_BYTES, "little") for value in raw)
