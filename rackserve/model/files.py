"""A model on this machine: where its files are, what shape it has, how its text begins and ends."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.model.config import LlamaConfig, read_config, read_json
from rackserve.model.embedded import SMOLLM2, prepare
from rackserve.model.loader.folder import weight_files

EMBEDDED_NAMES = ("embedded", SMOLLM2.name)


class ModelFiles(msgspec.Struct, frozen=True):
    """A model folder in Hugging Face form.

    revision       hex digest that changes with every byte of the weights and the config
    chat_template  Jinja text, empty if the model has none
    bos_id         token a text begins with, -1 if none
    eos_ids        tokens that end an answer
    """

    name: str
    path: Path
    revision: str
    config: LlamaConfig
    tokenizer_path: Path
    chat_template: str
    bos_id: int
    eos_ids: tuple[int, ...]


def open_model(name_or_path: str) -> ModelFiles:
    """The model called "embedded" or "smollm2-135m" (fetched once if need be), or the folder at that path.

    FileFormatError if a file is missing or malformed, ResourceError if the embedded model cannot be fetched.
    """
    if name_or_path in EMBEDDED_NAMES:
        return _read_folder(prepare(SMOLLM2), SMOLLM2.name, SMOLLM2.sha256)
    folder = Path(name_or_path)
    if not folder.is_dir():
        names = " or ".join(EMBEDDED_NAMES)
        raise FileFormatError(f"{name_or_path}: no such folder; name a Hugging Face model folder, or {names}")
    return _read_folder(folder, folder.resolve().name, _digest(folder))


def _read_folder(folder: Path, name: str, revision: str) -> ModelFiles:
    config = read_config(folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise FileFormatError(f"{tokenizer}: missing; a model folder needs a tokenizer in this format")
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id", fields.get("eos_token_id"))
    bos = fields.get("bos_token_id")
    return ModelFiles(
        name=name,
        path=folder,
        revision=revision,
        config=config,
        tokenizer_path=tokenizer,
        chat_template=_chat_template(folder),
        bos_id=-1 if bos is None else bos,
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
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
