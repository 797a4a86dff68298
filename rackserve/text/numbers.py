"""Text of a model that has no tokenizer: its token ids as decimal numbers."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

from rackserve.base.errors import RequestError
from rackserve.text.quoting import Quoting
from rackserve.text.tokenizer import Encoded, Piece, pack

_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


class NumberTokenizer:
    """Token i is written as its number and a space, so that numbers stay apart however they are joined: 7 and 12 are "7 12 ".

    Same attributes and methods as `Tokenizer`; there are no special ids, so an answer shows every id.
    """

    __slots__ = ("eos_ids", "frame", "quoting", "special_ids", "vocab_size")

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.special_ids: frozenset[int] = frozenset()
        self.eos_ids = eos_ids
        self.frame = (b"", b"")
        self.quoting = Quoting({})

    def encode(self, text: str, *, specials: bool = False) -> bytes:
        """Ids named in `text`, apart by white space; nothing is ever added, whatever `specials` says.

        Raises RequestError naming the first word that is not a number of the vocabulary.
        """
        ids = []
        for place, word in enumerate(text.split()):
            token_id = self.token_id(word)
            if token_id is None:
                shown = word if len(word) <= 40 else word[:37] + "..."
                raise RequestError(
                    f"word {place} of the text is {shown!r}: the served model has no tokenizer, so write token ids from 0 to "
                    f"{self.vocab_size - 1} with spaces between them"
                )
            ids.append(token_id)
        return pack(ids)

    def encode_pieces(self, pieces: Iterable[Piece]) -> bytes:
        """Ids named in the joined pieces; RequestError as `encode`."""
        return self.encode("".join(piece.text for piece in pieces))

    def encode_cut(self, text: str) -> Encoded:
        """Ids as `encode`, and one cut: behind the last space."""
        tokens, end = self.encode(text), text.rfind(" ") + 1
        return Encoded(tokens, array("q", [len(text[:end].encode())]), array("q", [len(text[:end].split())]))

    def encode_pieces_cut(self, pieces: Iterable[Piece]) -> Encoded:
        """The joined pieces as `encode_cut`."""
        return self.encode_cut("".join(piece.text for piece in pieces))

    def token_id(self, token: str) -> int | None:
        """The id written as `token` (no sign, no leading zero), or None."""
        if not _NUMBER.fullmatch(token):
            return None
        return int(token) if int(token) < self.vocab_size else None

    def piece(self, token_id: int) -> bytes:
        """The number and a space, in ASCII; empty for ids outside the vocabulary."""
        return b"%d " % token_id if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""
        return b"".join(map(self.piece, ids)).decode("ascii")
