"""Compressed token ids: tokens whose texts differ only in case, accents or blanks share one, so their n-grams share rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.config import DeepseekV41Config

TokenMap = NDArray[np.int32]
"""[vocab_size]: compressed id of each token id."""

MAP_FILE = "engram_token_map.npy"
TOKENIZER_FILE = "tokenizer.json"

_LONE_SPACE = "\ue000"
"""Stands for a text of one space while blanks around texts are taken off (a private code point, in no token)."""

_NOT_UTF8 = "\ufffd"


def token_map(folder: Path, config: DeepseekV41Config) -> TokenMap:
    """The map of the model in `folder`: its `engram_token_map.npy` if it has one, else worked out of its `tokenizer.json`.

    FileFormatError if neither is there, or if the map does not fit `config`: other ids would read other rows unnoticed.
    """
    stored, tokenizer = folder / MAP_FILE, folder / TOKENIZER_FILE
    size = config.engram_compressed_vocab_size
    if stored.exists():
        return _read_map(stored, config.vocab_size, size)
    if not tokenizer.exists():
        raise FileFormatError(
            f"{tokenizer}: missing; Engram needs it, or {MAP_FILE} beside it (int32 [{config.vocab_size}], compressed ids)"
        )
    found = compressed_map(tokenizer, config.vocab_size)
    if found.max() + 1 != size:
        raise FileFormatError(
            f"{tokenizer}: gives {found.max() + 1} compressed ids, config.json has engram_compressed_vocab_size {size}; "
            "use the tokenizer of this model"
        )
    return found


def compressed_map(tokenizer_json: Path, vocab_size: int) -> TokenMap:
    """int32 [vocab_size]. Ids are numbered by first appearance. FileFormatError if the file cannot be read."""
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the library raises bare exceptions
        raise FileFormatError(f"{tokenizer_json}: not a tokenizer ({error}); fetch it again") from error
    alike = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    numbers: dict[str | None, int] = {}
    result = np.empty(vocab_size, np.int32)
    for token, text in enumerate(tokenizer.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False)):
        # Part of a character has no text to compare: it stands for itself.
        key = tokenizer.id_to_token(token) if _NOT_UTF8 in text else alike.normalize_str(text) or text
        result[token] = numbers.setdefault(key, len(numbers))
    return result


def _read_map(path: Path, vocab_size: int, size: int) -> TokenMap:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: truncated or not an array ({error}); write it again") from error
    if not isinstance(found, np.ndarray) or found.dtype != np.int32 or found.shape != (vocab_size,):
        raise FileFormatError(f"{path}: must be one int32 array of {vocab_size} ids; write it again")
    if found.min() < 0 or found.max() >= size:
        raise FileFormatError(
            f"{path}: has ids outside 0 to {size - 1} (engram_compressed_vocab_size of config.json); use the map of this model"
        )
    return found
