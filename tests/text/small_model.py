"""A small byte-level BPE model folder, trained in memory: 256 bytes, two turn markers, a few merges."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from rackserve.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, EOS = 0, 1


@lru_cache
def backend() -> Backend:
    model = Backend(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the cat sat on the mat and that is that", "hello there, hello you", "naïve café"] * 4, trainer)
    model.add_tokens(["<think>", "two words"])
    return model


@lru_cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer(backend(), (EOS,))


def byte_ids(text: str | bytes) -> list[int]:
    """One id per byte of `text`, whatever the merges."""
    raw = text.encode() if isinstance(text, str) else text
    tokenizer = small_tokenizer()
    table = {tokenizer.piece(number): number for number in range(tokenizer.vocab_size - 1, -1, -1)}
    return [table[bytes([byte])] for byte in raw]


def write_folder(folder: Path, template: object = CHATML) -> None:
    backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
