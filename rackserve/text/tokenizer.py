"""Byte-level BPE from a model folder: text to int32 token ids, and the exact bytes behind every id."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from tokenizers import Tokenizer as Backend

from rackserve.base.errors import FileFormatError, RequestError


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


class Piece(NamedTuple):
    """Part of a prompt. `ours`: the template wrote it, so special tokens in it count; else it came from the client."""

    text: str
    ours: bool


class Vocabulary(Protocol):
    """What serving needs of a model's text side; see `Tokenizer` for what each means."""

    vocab_size: int
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, specials: bool = False) -> bytes: ...
    def encode_pieces(self, pieces: Iterable[Piece]) -> bytes: ...
    def token_id(self, token: str) -> int | None: ...
    def piece(self, token_id: int) -> bytes: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads.

    vocab_size   one more than the largest id
    special_ids  ids that stand for no text (turn markers and the like); they decode to nothing
    eos_ids      ids that end an answer
    """

    __slots__ = ("_added", "_backend", "_marks", "_pieces", "_plain", "eos_ids", "special_ids", "vocab_size")

    def __init__(self, backend: Backend, eos_ids: tuple[int, ...] = ()) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._plain: Backend | None = None  # the same without added tokens, made when a client first writes one
        self._added = frozenset(added)
        self._marks: dict[str, tuple[tuple[int, int, int], ...]] = {}
        self._pieces: dict[int, bytes] = {}
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_ids = eos_ids

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
        pieces = tuple(pieces)
        (ids,) = _ids(self._backend, ["".join(piece.text for piece in pieces)])
        written = [mark[0] for piece in pieces if piece.ours for mark in self._marks_in(piece.text)]
        if list(filter(self._added.__contains__, ids)) == written:
            return pack(ids)
        return pack(self._encode_apart(pieces))

    def _marks_in(self, text: str) -> tuple[tuple[int, int, int], ...]:
        """(id, start, end) of each added token in a text of the template; remembered, for templates have few texts."""
        marks = self._marks.get(text)
        if marks is None:
            encoding = self._backend.encode(text, add_special_tokens=False)
            found = zip(encoding.ids, encoding.offsets, strict=True)
            marks = self._marks[text] = tuple((number, *span) for number, span in found if number in self._added)
        return marks

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
            for number, start, end in self._marks_in(piece.text) if piece.ours else ():
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

    def _spell(self, token_id: int) -> bytes:
        token = None if token_id in self.special_ids or token_id < 0 else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token, spelt as itself
            return token.encode()


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
