"""A model on this machine: where its files are, what shape it has, how its text begins and ends."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

import rackserve
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.model.config import LlamaConfig, read_json
from rackserve.model.config import read_config as read_llama
from rackserve.model.deepseek_v41.config import MODEL_TYPE, DeepseekV41Config
from rackserve.model.deepseek_v41.config import read_config as read_deepseek_v41
from rackserve.model.embedded import SMOLLM2, prepare
from rackserve.model.loader.folder import weight_files

EMBEDDED_NAMES = ("embedded", SMOLLM2.name)

GOLDEN_NAME = "golden"
GOLDEN_FOLDER = Path(rackserve.__file__).parents[1] / "tests" / "golden" / "deepseek_v41_tiny"
"""A DeepSeek-V4.1 checkpoint of 3.5 million random weights, in the repository alone."""


class ModelFiles(msgspec.Struct, frozen=True):
    """A model folder in Hugging Face form.

    known_revision  the revision if it is known without reading the weights, else empty
    tokenizer_path  None if the model has no tokenizer (DeepSeek-V4.1 only): it is spoken to in token ids
    chat_template   Jinja text, empty if the model has none
    bos_id          token a text begins with, -1 if none
    eos_ids         tokens that end an answer
    """

    name: str
    path: Path
    config: LlamaConfig | DeepseekV41Config
    tokenizer_path: Path | None
    chat_template: str
    bos_id: int
    eos_ids: tuple[int, ...]
    known_revision: str = ""

    @property
    def llama(self) -> LlamaConfig:
        """The shape of a Llama model; ConfigError if it is another."""
        if not isinstance(self.config, LlamaConfig):
            raise ConfigError(f"{self.path} holds a DeepSeek-V4.1 model: set runner.kind to deepseek_v41")
        return self.config

    @property
    def deepseek_v41(self) -> DeepseekV41Config:
        """The shape of a DeepSeek-V4.1 model; ConfigError if it is another."""
        if not isinstance(self.config, DeepseekV41Config):
            raise ConfigError(f"{self.path} holds a Llama model: set runner.kind to llama, or runner.model to another folder")
        return self.config

    @property
    def revision(self) -> str:
        """Hex digest that changes with every byte of the weights and the config. May read all of them."""
        return self.known_revision or _digest(self.path)


def kind_of(name_or_path: str) -> Literal["llama", "deepseek_v41"]:
    """Which kind of model that is, by its configuration alone; "llama" if there is none: opening it says what is missing."""
    path = (GOLDEN_FOLDER if name_or_path == GOLDEN_NAME else Path(name_or_path)) / "config.json"
    if name_or_path in EMBEDDED_NAMES or not path.is_file():
        return "llama"
    return "deepseek_v41" if read_json(path).get("model_type") == MODEL_TYPE else "llama"


def open_model(name_or_path: str) -> ModelFiles:
    """The model called "embedded" or "smollm2-135m" (fetched once if need be) or "golden", or the folder at that path.

    FileFormatError if a file is missing or malformed, ResourceError if the embedded model cannot be fetched.
    """
    if name_or_path in EMBEDDED_NAMES:
        return _read_folder(prepare(SMOLLM2), SMOLLM2.name, SMOLLM2.sha256)
    if name_or_path == GOLDEN_NAME:
        if not GOLDEN_FOLDER.is_dir():
            raise FileFormatError(f"{GOLDEN_NAME}: comes with the repository, not with an installed package; run from a clone")
        return _read_folder(GOLDEN_FOLDER, GOLDEN_NAME)
    folder = Path(name_or_path)
    if not folder.is_dir():
        names = " or ".join((*EMBEDDED_NAMES, GOLDEN_NAME))
        raise FileFormatError(f"{name_or_path}: no such folder; name a Hugging Face model folder, or {names}")
    return _read_folder(folder, folder.resolve().name)


def _read_folder(folder: Path, name: str, revision: str = "") -> ModelFiles:
    path = folder / "config.json"
    fields = read_json(path)
    is_deepseek = fields.get("model_type") == MODEL_TYPE
    config = read_deepseek_v41(path) if is_deepseek else read_llama(path)
    tokenizer = folder / "tokenizer.json"
    if not (tokenizer.is_file() or is_deepseek):
        raise FileFormatError(f"{tokenizer}: missing; a model folder needs a tokenizer in this format")
    weight_files(folder)
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id", fields.get("eos_token_id"))
    bos = fields.get("bos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    wrong = next((number for number in eos_ids if not isinstance(number, int) or not 0 <= number < config.vocab_size), None)
    if wrong is not None:
        raise FileFormatError(f"{folder}: eos_token_id {wrong!r} is no token of {config.vocab_size}; fetch config.json again")
    return ModelFiles(
        name=name,
        path=folder,
        config=config,
        tokenizer_path=tokenizer if tokenizer.is_file() else None,
        chat_template=_chat_template(folder),
        bos_id=-1 if bos is None else bos,
        eos_ids=eos_ids,
        known_revision=revision,
    )


def _chat_template(folder: Path) -> str:
    """The template in its own file or in the tokenizer's configuration; of several, the one named default."""
    own = folder / "chat_template.jinja"
    if own.exists():
        return own.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    found: Any = read_json(path).get("chat_template") if path.exists() else None
    if isinstance(found, list):
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found or ""


def _digest(folder: Path) -> str:
    """SHA-256 over the config and all weights: two models never share cached KV, however alike their shapes."""
    digest = hashlib.sha256()
    for path in (folder / "config.json", *weight_files(folder)):
        if not path.is_file():
            raise FileFormatError(f"{path}: missing; a model folder needs this file")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
