"""Token ids to text, a few at a time, without ever showing half a character."""

from __future__ import annotations

import codecs

from rackserve.text.tokenizer import Vocabulary

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing answer. All pieces from `feed` and `flush`, joined, equal `Vocabulary.decode` of all ids."""

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._decoder = _utf8("replace")

    def feed(self, *token_ids: int) -> str:
        """Text that `token_ids` complete; bytes of a character still incomplete are kept back."""
        return self._decoder.decode(b"".join(map(self._tokenizer.piece, token_ids)))

    def flush(self) -> str:
        """The end of the answer: a character left incomplete comes out as U+FFFD."""
        return self._decoder.decode(b"", final=True)
