"""Models that several tests share: loaded once, on one thread as in a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rackserve.model.files import ModelFiles, open_model
from rackserve.model.llama import LlamaWeights, load_weights
from tests.model import tiny

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_logits.json"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return open_model(str(tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")))


@pytest.fixture(scope="session")
def tiny_weights(tiny_files: ModelFiles) -> LlamaWeights:
    return load_weights(tiny_files.path, tiny_files.config)


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    return open_model("embedded")


@pytest.fixture(scope="session")
def smollm2_weights(smollm2: ModelFiles) -> LlamaWeights:
    return load_weights(smollm2.path, smollm2.config)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    prompts: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    return prompts
