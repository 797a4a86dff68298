"""A sound checkpoint is mapped as it lies; every way of being unsound is refused with file, tensor and remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.checkpoint import MAX_HEADER_BYTES, open_checkpoint, read_header
from rackserve.model.loader.folder import INDEX_NAME, SINGLE_NAME

from .safetensors_files import (
    GOLDEN,
    Header,
    golden_config,
    golden_tensors,
    kinds,
    read_file,
    write_header,
    write_index,
    write_shards,
    write_tensors,
)

CONFIG = golden_config()
HEADER, DATA = read_file(GOLDEN / SINGLE_NAME)
REMEDIES = ("fetch it again", "fetch the file again", "fetch the weights again", "fetch both again", "use matching files",
            "use weights in that layout", "keep one of them")  # fmt: skip


def refusal(folder: Path) -> str:
    """The error of opening `folder`; it must name a path in it and a remedy."""
    with pytest.raises(FileFormatError) as caught:
        open_checkpoint(folder, CONFIG)
    text = str(caught.value)
    assert text.startswith(str(folder)) and text.endswith(REMEDIES), text
    return text


def drop(header: Header, name: str) -> int:
    begin, end = header.pop(name)["data_offsets"]
    for fields in header.values():
        fields["data_offsets"] = [at - (end - begin) if at >= end else at for at in fields["data_offsets"]]
    return begin - end


def reshape(header: Header, name: str) -> int:
    header[name]["shape"] = [1, *header[name]["shape"]]
    return 0


def retype(header: Header, name: str) -> int:
    same_size = {"F8_E4M3": "I8", "F8_E8M0": "U8", "I8": "F8_E4M3", "BF16": "F16", "F32": "I32"}
    header[name]["dtype"] = same_size[header[name]["dtype"]]
    return 0


def lengthen(header: Header, name: str) -> int:
    header[name]["shape"] = [header[name]["shape"][0] + 1, *header[name]["shape"][1:]]
    return 0


def overlap(header: Header, name: str) -> int:
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin - 1, end - 1] if begin else [begin + 1, end + 1]
    return 0


def push_out(header: Header, name: str) -> int:
    header[name]["data_offsets"] = [at + len(DATA) for at in header[name]["data_offsets"]]
    return 0


def rename(header: Header, name: str) -> int:
    header[f"{name}_old"] = header.pop(name)
    return 0


CORRUPTIONS: dict[Callable[[Header, str], int], str] = {
    drop: "is missing|comes without its scale",
    rename: "is missing|comes without its scale",
    reshape: "has shape .* config.json asks for",
    retype: "the released layout stores",
    lengthen: "takes .* bytes, but",
    overlap: "overlaps|belong to nothing",
    push_out: "reaches .* beyond the end of the file",
}
"""What is changed in the header, returning by how much the data grow, and what the error says."""


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@pytest.mark.parametrize("name", kinds())
def test_every_tensor_is_checked(corrupt: Callable[[Header, str], int], name: str, tmp_path: Path) -> None:
    header = {key: dict(fields) for key, fields in HEADER.items()}
    growth = corrupt(header, name)
    write_header(tmp_path / SINGLE_NAME, header, len(DATA) + growth)
    with pytest.raises(FileFormatError, match=CORRUPTIONS[corrupt]) as caught:
        open_checkpoint(tmp_path, CONFIG)
    text = str(caught.value)
    assert name in text and SINGLE_NAME in text and text.endswith(REMEDIES), text


def test_an_unchanged_header_passes_the_checks_that_the_changed_ones_fail(tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE_NAME, HEADER, len(DATA))
    assert set(open_checkpoint(tmp_path, CONFIG).tensors) == set(HEADER)


def test_tensors_lie_where_they_are_said_to() -> None:
    checkpoint = open_checkpoint(GOLDEN, CONFIG)
    content = (GOLDEN / SINGLE_NAME).read_bytes()
    for name, (_, _, expected) in golden_tensors().items():
        path, offset, size = checkpoint.location(name)
        assert path == GOLDEN / SINGLE_NAME and content[offset : offset + size] == expected == bytes(checkpoint.view(name))
    assert checkpoint.view("embed.weight").readonly
    with pytest.raises(KeyError):
        checkpoint.location("layers.0.attn.wq_a")


# ---------------------------------------------------------------- shards


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    named = write_shards(tmp_path, 3)
    checkpoint = open_checkpoint(tmp_path, CONFIG)
    for name, (_, _, expected) in golden_tensors().items():
        assert checkpoint.location(name)[0].name == named[name] and bytes(checkpoint.view(name)) == expected


def test_a_shard_must_hold_what_the_index_says(tmp_path: Path) -> None:
    named = write_shards(tmp_path, 3)
    other = next(shard for shard in named.values() if shard != named["norm.weight"])
    write_index(tmp_path, {**named, "norm.weight": other})
    assert f"{other}: lacks tensor norm.weight" in refusal(tmp_path)
    write_index(tmp_path, {**named, "layers.8.attn_norm.weight": other})
    assert f"{other}: lacks tensor layers.8.attn_norm.weight" in refusal(tmp_path)
    write_index(tmp_path, {name: shard for name, shard in named.items() if name != "norm.weight"})
    assert "does not name tensor norm.weight" in refusal(tmp_path)


def test_no_tensor_may_be_in_two_shards(tmp_path: Path) -> None:
    named = write_shards(tmp_path, 3)
    first, second = sorted(set(named.values()))[:2]
    shutil.copy(tmp_path / first, tmp_path / second)
    assert f"{second}: tensor " in refusal(tmp_path) and f"is in {first} too" in refusal(tmp_path)


def test_a_missing_or_cut_shard_is_named(tmp_path: Path) -> None:
    named = write_shards(tmp_path, 3)
    last = tmp_path / max(named.values())
    content = last.read_bytes()
    last.write_bytes(content[:-1])
    assert f"{last}: truncated: tensor " in refusal(tmp_path)
    last.unlink()
    assert f"{last}: shard named in {INDEX_NAME} is missing" in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="holds neither"):
        open_checkpoint(tmp_path, CONFIG)


# ---------------------------------------------------------------- what else is in the file


def test_the_image_part_is_passed_over_and_strangers_are_refused(tmp_path: Path) -> None:
    tensors = golden_tensors()
    image = {"vision.patch.weight": ("F16", [2], b"\0" * 4), "image_start": ("BF16", [1], b"\0\0")}
    write_tensors(tmp_path / SINGLE_NAME, tensors | image)
    assert not image.keys() & open_checkpoint(tmp_path, CONFIG).tensors.keys()
    write_tensors(tmp_path / SINGLE_NAME, tensors | {"layers.0.attn.wq_c.weight": ("F16", [2], b"\0" * 4)})
    assert "tensor layers.0.attn.wq_c.weight belongs to no model" in refusal(tmp_path)


def test_bytes_that_belong_to_nothing_are_refused(tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE_NAME, HEADER, len(DATA) + 3)
    assert "3 bytes after tensor" in refusal(tmp_path)


def entry(**changes: object) -> bytes:
    return json.dumps({"norm.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]} | changes}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\1\0\0", "truncated: 3 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated: a header of 1000 bytes in a file of 10"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", f"a header of {MAX_HEADER_BYTES + 1} bytes"),
        (b"\xff" * 64, "a header of 18446744073709551615 bytes"),
    ],
)
def test_a_file_must_begin_with_a_whole_header(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(content)
    assert says in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1, "a": 2}', "not valid JSON (a comes twice)"),
        (b"[]", "its header is a JSON list"),
        (b'{"norm.weight": 3}', "tensor norm.weight is described by 3"),
        (b'{"norm.weight": {}}', "tensor norm.weight has dtype None"),
        (entry(dtype="F7"), "tensor norm.weight has dtype 'F7'"),
        (entry(dtype=["BF16"]), "tensor norm.weight has dtype ['BF16']"),
        (entry(shape=1), "tensor norm.weight has shape 1"),
        (entry(shape=[True]), "tensor norm.weight has shape [True]"),
        (entry(shape=[-1]), "tensor norm.weight has shape [-1]"),
        (entry(shape=[1.0]), "tensor norm.weight has shape [1.0]"),
        (entry(shape=[2**70]), "tensor norm.weight has shape [1180591620717411303424]"),
        (entry(shape=[2**40, 2**40]), "tensor norm.weight takes 2 bytes, but BF16"),
        (entry(data_offsets=[0]), "tensor norm.weight has data_offsets [0]"),
        (entry(data_offsets=[2, 0]), "tensor norm.weight has data_offsets [2, 0]"),
        (entry(data_offsets=[0, "2"]), "tensor norm.weight has data_offsets [0, '2']"),
        (entry(data_offsets=[-2, 0]), "tensor norm.weight has data_offsets [-2, 0]"),
        (entry(data_offsets=[2, 4]), "2 bytes between the header and tensor norm.weight"),
    ],
)
def test_a_header_must_make_sense(header: bytes, says: str, tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE_NAME, header, 4)
    assert says in refusal(tmp_path)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(data=st.data())
def test_garbage_is_refused_and_never_crashes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    write_header(path, entry(), 2)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        entries = read_header(path)
    except FileFormatError as error:
        assert str(path) in str(error)
    else:
        assert all(found.offset + found.num_bytes <= path.stat().st_size for found in entries.values())
