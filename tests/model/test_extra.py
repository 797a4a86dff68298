from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rackserve.base.errors import ResourceError
from rackserve.model import extra
from rackserve.model.embedded import EmbeddedModel, prepare


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name in names else ModuleSpec(name, None))


def test_nothing_is_missing_where_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    extra.require_engine()


@pytest.mark.parametrize("names", [("torch",), ("gguf", "safetensors"), extra.PACKAGES])
def test_what_is_missing_is_named_with_the_command_that_brings_it(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, *names)
    with pytest.raises(ResourceError) as caught:
        extra.require_engine()
    text = str(caught.value)
    assert f"needs {', '.join(names)}: pip install -e '.[engine]' in the checkout" in text
    assert "pip install torch --index-url" in text and "\n" not in text


def test_nothing_is_fetched_for_a_conversion_that_cannot_be_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fetch(model: EmbeddedModel, folder: Path) -> None:
        raise AssertionError("fetched")

    hide(monkeypatch, "gguf")
    with pytest.raises(ResourceError, match="needs gguf"):
        prepare(EmbeddedModel("tiny", "tiny-package", "1.0", "00"), tmp_path, fetch)
