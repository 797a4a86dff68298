"""From token ids to table rows: each n-gram that ends at a token is hashed once per head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.engram.vocabulary import TokenMap

Addresses = NDArray[np.int64]
"""[T, columns] rows of one layer's table. Columns are n-gram orders, from 2 up, and the heads inside each."""


class NgramHash:
    """Rows of every Engram layer's table that tokens need. Keeps nothing of the tokens it has seen.

    FileFormatError if the tables of `config` are not as long as the hash's columns together.
    """

    __slots__ = ("_multipliers", "_offsets", "_pad", "_primes", "_token_map", "layers", "lookback")

    def __init__(self, config: DeepseekV41Config, token_map: TokenMap) -> None:
        self.layers = config.engram_layer_ids
        self.lookback = config.engram_max_ngram_size - 1
        """Ids before a token that its rows depend on."""
        self._token_map = token_map
        self._pad = int(token_map[config.engram_pad_token_id])
        primes = column_primes(config)
        if tuple(primes.sum(1).tolist()) != config.engram_num_embeddings:
            raise FileFormatError(
                f"config.json: text_config.engram_num_embeddings is {list(config.engram_num_embeddings)}, but its other engram "
                f"fields ask for {primes.sum(1).tolist()}; fetch the file again"
            )
        self._offsets = primes.cumsum(1) - primes
        self._primes = primes.reshape(len(self.layers), self.lookback, config.engram_n_heads)
        self._multipliers = multipliers(config)

    def addresses(self, stretches: Sequence[tuple[ArrayLike, ArrayLike]]) -> dict[int, Addresses]:
        """Rows by layer for the ids of `stretches`, one after the other: int64 [all ids, columns].

        A stretch is (history, ids): token ids of consecutive positions of a sequence, and before them the last `lookback` ids
        or more, fewer only where the sequence has no more. So how a sequence is cut into stretches changes nothing.
        """
        grams = self._grams(stretches)
        result = {}
        for number, layer in enumerate(self.layers):
            # Products stay below 2^63 and are not negative, so int64 is exact and the remainder is that of a plain number.
            products = grams * self._multipliers[number][:, None]
            mixed = np.bitwise_xor.accumulate(products, axis=0)[1:]
            rows = mixed.T[:, :, None] % self._primes[number]
            result[layer] = rows.reshape(grams.shape[1], self._offsets.shape[1]) + self._offsets[number]
        return result

    def _grams(self, stretches: Sequence[tuple[ArrayLike, ArrayLike]]) -> NDArray[np.int64]:
        """Compressed ids [lookback + 1, all ids]: line s holds those of s positions before; the pad id before a sequence."""
        back = self.lookback
        pieces, lengths = [], []
        for history, ids in stretches:
            before, own = np.asarray(history, np.int64)[-back:], np.asarray(ids, np.int64)
            pieces += [np.full(back - len(before), self._pad, np.int64), self._compress(before), self._compress(own)]
            lengths.append(len(own))
        line = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        # Each stretch begins `back` places later than its ids alone would.
        at = np.arange(sum(lengths)) + back * np.repeat(np.arange(1, len(lengths) + 1), lengths)
        return line.take(at - np.arange(back + 1)[:, None])

    def _compress(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        compressed: NDArray[np.int64] = self._token_map[ids].astype(np.int64)
        return compressed


def column_primes(config: DeepseekV41Config) -> NDArray[np.int64]:
    """[layers, columns] rows per column: the primes from `engram_vocab_size` up, none of them used twice."""
    shape = (len(config.engram_layer_ids), config.engram_columns)
    return np.fromiter(islice(_primes(config.engram_vocab_size), shape[0] * shape[1]), np.int64).reshape(shape)


def multipliers(config: DeepseekV41Config) -> NDArray[np.int64]:
    """[layers, orders] odd factors, that of the current token first; times a compressed id they stay inside int64."""
    bound = max(1, np.iinfo(np.int64).max // config.engram_compressed_vocab_size // 2)
    drawn = [
        np.random.default_rng(10007 * layer).integers(0, bound, config.engram_max_ngram_size, np.int64)
        for layer in config.engram_layer_ids
    ]
    return np.stack(drawn) * 2 + 1


def _primes(least: int) -> Iterator[int]:
    """Primes from `least` up."""
    for number in count(max(least, 2)):
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            yield number
