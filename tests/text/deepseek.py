"""The tokenizer of DeepSeek-V4.1, made once per test run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rackserve.text.deepseek_tokenizer import complete
from rackserve.text.tokenizer import Tokenizer


@lru_cache
def deepseek_tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        complete(Path(folder))
        return Tokenizer.from_folder(Path(folder))
