"""Prompts of sessions, kept so that the next turn is tokenised, and its blocks are named, only from where it is new."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock

import msgspec

from rackserve.base.keys import TOKEN_BYTES, Chain, extend_chain, prefix
from rackserve.text.prompt_text import PromptText, Stem, Written, common_prefix
from rackserve.text.quoting import Piece
from rackserve.text.tokenizer import Encoded, Vocabulary

STRIDE_BYTES = 4096
"""Texts are found by content if they share a beginning of a multiple of this length."""

MAX_FORKS = 4
"""Prompts kept of one session that do not go on from each other."""


class Scope(msgspec.Struct, frozen=True):
    """Whose prompts to look among: those of one namespace, so that no tenant's waiting tells of another's prompts.

    root, block_tokens  of the `CacheNamespace`
    session             the conversation, or "" if it has no name
    """

    root: bytes
    block_tokens: int
    session: str = ""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as ids and block keys.

    tokens         int32 little-endian ids
    chain          keys of its full blocks
    reused_tokens  ids taken over from a prompt before
    left_at        the first id that differs from the session's last prompt; None if this one goes on from it
    """

    tokens: bytes
    chain: Chain
    reused_tokens: int
    left_at: int | None


class Counts(msgspec.Struct, frozen=True):
    """What a cache has done and holds. `found`: prompts that went on from another than their session's last."""

    prompts: int = 0
    found: int = 0
    reused_tokens: int = 0
    encoded_tokens: int = 0
    evicted: int = 0
    kept: int = 0
    kept_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Kept:
    """A prompt that later ones may go on from; never changed. `group`: what must agree besides its text."""

    group: bytes
    session: str
    text: PromptText
    stem: Stem | None
    body: Encoded  # without the frame that the model's post-processing sets around it
    chain: Chain
    strides: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """What keeping it takes, about."""
        arrays = sum(len(part) * part.itemsize for part in (self.text.marks, self.body.ends, self.body.counts))
        arrays += 0 if self.stem is None else self.stem.num_bytes
        return len(self.text.raw) + len(self.body.tokens) + len(self.chain) + arrays + 200 * len(self.strides) + 2000

    def cuts(self, length: int) -> int:
        """How many cuts lie in the first `length` bytes."""
        return bisect_right(self.body.ends, length)


@dataclass(slots=True)
class _Found:
    """What a prompt has in common with kept ones. `own`: its session's last one; `base`: the one to go on from."""

    own: _Kept | None
    base: _Kept | None
    shared: int  # bytes in common with `base`
    strides: tuple[bytes, ...]  # digests of the prompt's own strides

    @property
    def continues(self) -> bool:
        """Whether the prompt leaves no cut of `base` behind."""
        return self.base is not None and self.base.cuts(self.shared) == len(self.base.body.ends)


class PromptCache:
    """Turns prompts into ids and keys that are exactly those of the whole text, at the cost of what is new in it.

    A prompt is compared with the last of its session and, if it does not go on from that, with others of its session and
    with a kept one that shares most of its beginning. Up to the last cut (see `Encoded`) in what they share ids are taken
    over, and keys up to the last full block of these. May be used from several threads; nothing slow is done under the
    lock. `max_bytes` bounds what is kept: the prompts used last.
    """

    __slots__ = ("_bytes", "_counts", "_kept", "_lock", "_places", "_sessions", "_vocabulary", "max_bytes")

    def __init__(self, vocabulary: Vocabulary, *, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._kept: OrderedDict[_Kept, None] = OrderedDict()  # the one used last at the end
        self._sessions: dict[tuple[bytes, str], list[_Kept]] = {}  # the latest at the end
        self._places: dict[bytes, _Kept] = {}  # digest of a beginning, in strides -> the latest prompt that has it
        self._bytes = 0
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """What has been done so far, and what is kept now."""
        with self._lock:
            return msgspec.structs.replace(self._counts, kept=len(self._kept), kept_bytes=self._bytes)

    def last(self, scope: Scope) -> Written | None:
        """The last prompt of the scope's session, which the next may be written on from."""
        with self._lock:
            forks = self._sessions.get((_group(scope, b""), scope.session), ())
            return Written(forks[-1].text, forks[-1].stem) if forks else None

    def encode(self, text: str, scope: Scope, *, specials: bool = False) -> Prompt:
        """`text` with the ids that `Vocabulary.encode` gives it. Raises RequestError as that does."""
        return self._prompt(Written(PromptText.whole(text)), scope, self._vocabulary.frame if specials else (b"", b""))

    def encode_pieces(self, pieces: Iterable[Piece], scope: Scope) -> Prompt:
        """`pieces` with the ids that `Vocabulary.encode_pieces` gives them. Raises RequestError as that does."""
        return self.encode_written(Written(PromptText.of(pieces)), scope)

    def encode_written(self, written: Written, scope: Scope) -> Prompt:
        """A prompt with the ids that `Vocabulary.encode_pieces` gives its pieces."""
        return self._prompt(written, scope, (b"", b""))

    def _encode_from(self, text: PromptText, start: int) -> Encoded:
        if len(text.marks) == 1 and text.marks[0] & 1:
            return self._vocabulary.encode_cut(text.raw[start:].decode())
        return self._vocabulary.encode_pieces_cut(text.pieces(start))

    def _prompt(self, written: Written, scope: Scope, frame: tuple[bytes, bytes]) -> Prompt:
        group = _group(scope, frame[0])
        text = written.text
        found = self._find(group, scope.session, text)
        base, count = found.base, 0
        if base is not None and base.text == text:
            body, count = base.body, len(base.body.tokens) // TOKEN_BYTES
        elif base is not None and (cuts := base.cuts(found.shared)):
            start, count = base.body.ends[cuts - 1], base.body.counts[cuts - 1]
            body = _join(base.body, cuts, self._encode_from(text, start))
        else:
            body = self._encode_from(text, 0)
        before = len(frame[0]) // TOKEN_BYTES
        tokens = frame[0] + body.tokens + frame[1]
        known = b"" if base is None else prefix(base.chain, (before + count) // scope.block_tokens if count else 0)
        chain = extend_chain(known, scope.root, tokens, scope.block_tokens)
        left_at = None
        if found.own is not None:
            left_at = common_prefix(found.own.body.tokens, body.tokens) // TOKEN_BYTES
            left_at = None if left_at * TOKEN_BYTES == len(found.own.body.tokens) else left_at + before
        self._keep(_Kept(group, scope.session, text, written.stem, body, chain, found.strides), found, count)
        return Prompt(tokens, chain, count, left_at)

    def _find(self, group: bytes, session: str, text: PromptText) -> _Found:
        """The kept prompt from which `text` can take over most."""
        with self._lock:
            forks = tuple(self._sessions.get((group, session), ()))
        own = forks[-1] if forks else None
        found = _Found(own, own, own.text.common(text) if own is not None else 0, ())
        found.strides = _strides(group, text.raw, () if own is None else own.strides[: found.shared // STRIDE_BYTES])
        if found.continues:
            return found
        with self._lock:
            alike = (self._places.get(digest) for digest in reversed(found.strides))
            other = next((prompt for prompt in alike if prompt is not None), None)
        for prompt in (*forks[:-1], *([other] if other is not None else [])):
            shared = prompt.text.common(text)
            if shared > found.shared:
                found.base, found.shared = prompt, shared
        return found

    def _keep(self, prompt: _Kept, found: _Found, reused: int) -> None:
        base = found.base
        with self._lock:
            old = self._counts
            self._counts = msgspec.structs.replace(
                old,
                prompts=old.prompts + 1,
                found=old.found + (reused > 0 and base is not found.own),
                reused_tokens=old.reused_tokens + reused,
                encoded_tokens=old.encoded_tokens + len(prompt.body.tokens) // TOKEN_BYTES - reused,
            )
            if base is not None and base in self._kept:
                self._kept.move_to_end(base)
                if found.continues and base.session == prompt.session:
                    self._drop(base)
            if prompt.num_bytes > self.max_bytes:
                return
            self._kept[prompt] = None
            self._bytes += prompt.num_bytes
            self._places.update(dict.fromkeys(prompt.strides, prompt))
            if prompt.session:
                forks = self._sessions.setdefault((prompt.group, prompt.session), [])
                forks.append(prompt)
                if len(forks) > MAX_FORKS:
                    self._drop(forks[0])
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._kept)))
                self._counts = msgspec.structs.replace(self._counts, evicted=self._counts.evicted + 1)

    def _drop(self, prompt: _Kept) -> None:
        del self._kept[prompt]
        self._bytes -= prompt.num_bytes
        for digest in prompt.strides:
            if self._places.get(digest) is prompt:
                del self._places[digest]
        forks = self._sessions.get((prompt.group, prompt.session), [])
        if prompt in forks:
            forks.remove(prompt)
            if not forks:
                del self._sessions[prompt.group, prompt.session]


def _join(base: Encoded, cuts: int, rest: Encoded) -> Encoded:
    """The ids and cuts of `base` up to its cut number `cuts`, and then those of the `rest` of the text."""
    start, count = base.ends[cuts - 1], base.counts[cuts - 1]
    return Encoded(
        b"".join((memoryview(base.tokens)[: count * TOKEN_BYTES], rest.tokens)),
        base.ends[:cuts] + array("q", [start + end for end in rest.ends]),
        base.counts[:cuts] + array("q", [count + number for number in rest.counts]),
    )


def _group(scope: Scope, frame: bytes) -> bytes:
    return b"%d %b %b" % (scope.block_tokens, frame, scope.root)


def _strides(group: bytes, raw: bytes, known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """Digest of `group` and the first n strides of `raw`, for each n; the first of them are `known`."""
    digests = list(known)
    digest = digests[-1] if digests else group
    for start in range(len(known) * STRIDE_BYTES, len(raw) - STRIDE_BYTES + 1, STRIDE_BYTES):
        digest = blake2b(digest + raw[start : start + STRIDE_BYTES], digest_size=16).digest()
        digests.append(digest)
    return tuple(digests)
