"""Byte-level BPE from a model folder: text to int32 token ids, and the exact bytes behind every id."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from tokenizers import Tokenizer as Backend

from rackserve.base.errors import FileFormatError, RequestError
from rackserve.text.quoting import Piece as Piece
from rackserve.text.quoting import Quoting, any_of


def pack(ids: Iterable[int]) -> bytes:
    """Token ids as int32 little-endian, the form in which they travel."""
    buffer = array("i", ids)
    if sys.byteorder == "big":
        buffer.byteswap()
    return buffer.tobytes()


def unpack(tokens: bytes) -> tuple[int, ...]:
    """The ids in a buffer made by `pack`."""
    buffer = array("i")
    buffer.frombytes(tokens)
    if sys.byteorder == "big":
        buffer.byteswap()
    return tuple(buffer)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises FileFormatError when it is missing or something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); give a model folder that holds it") from error
    except msgspec.MsgspecError as error:
        raise FileFormatError(f"{path}: not a JSON object ({error}); fetch the model folder again") from error


def _characters() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, inverted."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in plain]
    table.update({chr(256 + place): byte for place, byte in enumerate(rest)})
    return table


_BYTE_OF = _characters()


MAX_REMEMBERED = 4096
"""Texts of templates whose tokens are remembered, and characters of the longest of them."""


class Encoded(NamedTuple):
    """Ids of a text, and places at which it may be cut.

    tokens  the ids, int32 little-endian
    ends    UTF-8 bytes before each cut, rising
    counts  ids before each cut

    At a cut the ids before depend on nothing after it, and the ids after on nothing before: whatever text follows the first
    `ends[i]` bytes, the ids of the whole are the first `counts[i]` of `tokens`, then those of that text alone.
    """

    tokens: bytes
    ends: array[int]
    counts: array[int]


class Mark(NamedTuple):
    """An added token in a text: its id, its first character and the one after its last, and the bytes before that."""

    id: int
    start: int
    end: int
    end_bytes: int


class Vocabulary(Protocol):
    """What serving needs of a model's text side; see `Tokenizer` for what each means."""

    vocab_size: int
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    frame: tuple[bytes, bytes]
    quoting: Quoting

    def encode(self, text: str, *, specials: bool = False) -> bytes: ...
    def encode_pieces(self, pieces: Iterable[Piece]) -> bytes: ...
    def encode_cut(self, text: str) -> Encoded: ...
    def encode_pieces_cut(self, pieces: Iterable[Piece]) -> Encoded: ...
    def token_id(self, token: str) -> int | None: ...
    def piece(self, token_id: int) -> bytes: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads.

    vocab_size   one more than the largest id
    special_ids  ids that stand for no text (turn markers and the like); they decode to nothing
    eos_ids      ids that end an answer
    frame        what `encode` with `specials` sets before and after a text
    quoting      finds the added tokens in what clients write
    """

    __slots__ = (
        "_added", "_backend", "_cuts", "_marks", "_pieces", "_plain", "eos_ids", "frame", "quoting", "special_ids",
        "vocab_size",
    )  # fmt: skip

    def __init__(self, backend: Backend, eos_ids: tuple[int, ...] = ()) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._plain: Backend | None = None  # the same without added tokens, made when a client first writes one
        self._added = frozenset(added)
        self._cuts = CutTokens(backend)
        self._marks: dict[str, tuple[Mark, ...]] = {}
        self._pieces: dict[int, bytes] = {}
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_ids = eos_ids
        self.frame = _frame(backend)
        self.quoting = Quoting({token.content: token.special for token in added.values()})

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and, where present, what ends an answer (tokenizer_config.json, generation_config.json).

        Raises FileFormatError naming the file; also for tokenizers that are not byte-level BPE.
        """
        path = folder / "tokenizer.json"
        decoder = read_json(path).get("decoder")
        if "ByteLevel" not in msgspec.json.encode(decoder).decode():
            raise FileFormatError(f"{path}: only byte-level BPE tokenizers are supported, decoder is {decoder!r}")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise FileFormatError(f"{path}: not a tokenizer ({error}); fetch the model folder again") from error
        return cls(backend, _eos_ids(folder, backend))

    def encode(self, text: str, *, specials: bool = False) -> bytes:
        """Ids of `text`; with `specials` the model's own framing (such as a begin token) is added.

        Raises RequestError when `text` holds code points that are not text (lone surrogates).
        """
        (ids,) = _ids(self._backend, [text], specials=specials)
        return pack(ids)

    def encode_pieces(self, pieces: Iterable[Piece]) -> bytes:
        """Ids of a prompt in which special tokens count only where the template wrote them.

        A client's text that spells one is encoded as ordinary text; all other text gets the ids that `encode` of the whole
        prompt gives it. Raises RequestError as `encode`.
        """
        return pack(self._piece_ids(tuple(pieces)))

    def encode_cut(self, text: str) -> Encoded:
        """Ids as `encode` gives them without `specials`, and the cuts of `text`: the ends of its `CutTokens`."""
        (ids,) = _ids(self._backend, [text])
        return Encoded(pack(ids), *self._cuts.find(text.encode(), ids))

    def encode_pieces_cut(self, pieces: Iterable[Piece]) -> Encoded:
        """Ids as `encode_pieces`, and the cuts of the joined text: the ends of `CutTokens` that the template wrote."""
        pieces = tuple(pieces)
        ids = self._piece_ids(pieces)
        added = self._added
        ends, counts = array("q"), array("q")
        start, order = 0, iter([place for place, number in enumerate(ids) if number in added])
        for piece in pieces:
            for mark in self._marks_in(piece.text) if piece.ours else ():
                place = next(order, -1)
                if mark.id in self._cuts.ids and place >= 0:
                    ends.append(start + mark.end_bytes)
                    counts.append(place + 1)
            start += len(piece.text.encode())
        return Encoded(pack(ids), ends, counts)

    def _piece_ids(self, pieces: tuple[Piece, ...]) -> list[int]:
        if self.quoting.spelt([piece.text for piece in pieces if not piece.ours]):
            return self._encode_apart(pieces)
        (ids,) = _ids(self._backend, ["".join(piece.text for piece in pieces)])
        written = [mark.id for piece in pieces if piece.ours for mark in self._marks_in(piece.text)]
        return ids if list(filter(self._added.__contains__, ids)) == written else self._encode_apart(pieces)

    def _marks_in(self, text: str) -> tuple[Mark, ...]:
        """The added tokens in a text of the template; remembered if it is short, for templates have few such texts."""
        marks = self._marks.get(text)
        if marks is None:
            marks = tuple(Mark(number, *span, len(text[: span[1]].encode())) for number, span in self._added_in(text))
            if len(text) <= MAX_REMEMBERED and len(self._marks) < MAX_REMEMBERED:
                self._marks[text] = marks
        return marks

    def _added_in(self, text: str) -> Iterable[tuple[int, tuple[int, int]]]:
        """Id, first character and the one after the last of each added token. Encoding always tells, but slowly."""
        if self._cuts.complete:
            return self._cuts.search(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [(number, span) for number, span in found if number in self._added]

    def _encode_apart(self, pieces: tuple[Piece, ...]) -> list[int]:
        """Ids with the template's special tokens set between runs of text in which nothing is special."""
        if self._plain is None:
            described = msgspec.json.decode(self._backend.to_str())
            described["added_tokens"], described["post_processor"] = [], None
            self._plain = Backend.from_str(msgspec.json.encode(described).decode())
        marks: list[int] = []
        runs: list[list[str]] = [[]]
        for piece in pieces:
            done = 0
            for number, start, end, _ in self._marks_in(piece.text) if piece.ours else ():
                runs[-1].append(piece.text[done:start])
                marks.append(number)
                runs.append([])
                done = end
            runs[-1].append(piece.text[done:])
        encoded = _ids(self._plain, ["".join(run) for run in runs])
        ids = list(encoded[0])
        for number, run in zip(marks, encoded[1:], strict=True):
            ids.append(number)
            ids += run
        return ids

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def piece(self, token_id: int) -> bytes:
        """The bytes of text that `token_id` stands for: possibly part of a character, empty for special and unknown ids."""
        known = self._pieces.get(token_id)
        if known is None:
            known = self._pieces[token_id] = self._spell(token_id)
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def spelling(self, token_id: int) -> bytes:
        """The bytes in which `token_id` is written: as `piece`, but special tokens by their name."""
        return (self._backend.id_to_token(token_id) or "").encode() if token_id in self.special_ids else self.piece(token_id)

    def _spell(self, token_id: int) -> bytes:
        token = None if token_id in self.special_ids or token_id < 0 else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token, spelt as itself
            return token.encode()


class CutTokens:
    """The added tokens of a vocabulary that split a text for good.

    A tokenizer first finds added tokens in the plain text: one class (not normalized) before the other, each from left to
    right and at each place the longest. What lies between two found tokens is encoded on its own, and the search behind one
    goes on as if the text began there. So the end of a found token t is a cut unless other text behind it would have let
    a token T be found that takes in the end of t and more. T then contains all of t, or begins with an end of t.
    `ids` are the tokens of which no other one contains the spelling or begins with an end. `complete`: all added
    tokens are known here, so that `search` finds them in any text.

    Where that argument does not hold there are no cuts: with tokens that look at what surrounds them (whole words only, white
    space swallowed), and with tokens whose ids plain text can have too, by merges. Tokens matched in normalized text do not
    count, unless normalizing changes nothing.
    """

    __slots__ = ("_first", "_numbers", "_second", "_spelt", "complete", "ids")

    def __init__(self, backend: Backend) -> None:
        added = backend.get_added_tokens_decoder()
        plain = backend.normalizer is None or repr(backend.normalizer) == "Sequence(normalizers=[])"
        raw = {number: token.content for number, token in added.items() if plain or not token.normalized}
        looking = any(token.single_word or token.lstrip or token.rstrip for token in added.values())
        merged = (backend.model.tokenize(spelt) for spelt in raw.values())
        if looking or any(len(tokens) == 1 and tokens[0].id in raw for tokens in merged):
            raw = {}
        self._spelt = {number: spelt.encode() for number, spelt in raw.items()}
        classes = [[token.content for token in added.values() if token.normalized is kind] for kind in (False, True)]
        self._first, self._second = map(any_of, classes)
        self._numbers = {spelt: number for number, spelt in raw.items()}
        self.complete = len(self._numbers) == len(added)
        everything = "\n".join(raw.values())
        beginnings = {spelt[:end] for spelt in raw.values() for end in range(1, len(spelt))}
        self.ids = frozenset(
            number
            for number, spelt in raw.items()
            if everything.count(spelt) == 1 and not any(spelt[start:] in beginnings for start in range(1, len(spelt)))
        )

    def search(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """The added tokens in `text` in order: id, first character and the one after the last. Only if `complete`."""
        found: list[tuple[int, int]] = []
        done = 0
        for start, end in [*_spans(self._first, text, 0, len(text)), (len(text), len(text))]:
            found += _spans(self._second, text, done, start)
            found += [(start, end)] if end > start else []
            done = end
        return [(self._numbers[text[start:end]], (start, end)) for start, end in found]

    def find(self, raw: bytes, ids: list[int]) -> tuple[array[int], array[int]]:
        """Bytes and ids before each cut of the text `raw` (UTF-8), whose ids are `ids`.

        The next token found is at the next place of its spelling: an earlier one would have been found too, or lies across
        one that was found, behind whose end the search goes on.
        """
        ends, counts, done = array("q"), array("q"), 0
        spelt = self._spelt
        for place in [place for place, number in enumerate(ids) if number in spelt]:
            number = ids[place]
            done = raw.index(spelt[number], done) + len(spelt[number])
            if number in self.ids:
                ends.append(done)
                counts.append(place + 1)
        return ends, counts


def _spans(pattern: re.Pattern[str] | None, text: str, start: int, end: int) -> list[tuple[int, int]]:
    return [] if pattern is None else [found.span() for found in pattern.finditer(text, start, end)]


def _frame(backend: Backend) -> tuple[bytes, bytes]:
    """What the model's post-processing sets before and after any text."""
    plain, framed = (_ids(backend, ["a"], specials=specials)[0] for specials in (False, True))
    places = range(len(framed) - len(plain) + 1)
    start = next((place for place in places if framed[place : place + len(plain)] == plain), 0)
    return pack(framed[:start]), pack(framed[start + len(plain) :])


def _ids(backend: Backend, texts: list[str], *, specials: bool = False) -> list[list[int]]:
    try:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=specials)]
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestError("the text holds characters that are not valid Unicode") from error


def _eos_ids(folder: Path, backend: Backend) -> tuple[int, ...]:
    ids: list[int] = []
    if (folder / "generation_config.json").exists():
        listed = read_json(folder / "generation_config.json").get("eos_token_id")
        ids += listed if isinstance(listed, list) else [] if listed is None else [listed]
    if (folder / "tokenizer_config.json").exists():
        token = special_token(read_json(folder / "tokenizer_config.json"), "eos_token")
        number = backend.token_to_id(token)
        if number is not None:
            ids.append(number)
    return tuple(dict.fromkeys(ids))


def special_token(config: dict[str, Any], name: str) -> str:
    """The spelling of a token named in tokenizer_config.json, which gives a string or an object; "" if it names none."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
