from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError, ResourceError
from rackserve.base.step import Step, StepItem
from rackserve.base.units import MIB
from rackserve.digest_model import cold_output, digest_layout
from rackserve.live.rack import LiveRack
from rackserve.live.runner import RunnerSpec, layout_of, open_runner, process_bytes, require_packages
from rackserve.model import extra
from tests.model import libraries, tiny
from tests.text import small_model

LAYOUT_SCRIPT = """
import sys
from rackserve.live.rack import LiveRack
from rackserve.live.runner import RunnerSpec, layout_of, require_packages
spec = RunnerSpec(kind="llama", model=sys.argv[1])
require_packages(spec)
print(layout_of(spec).block_bytes, *sorted({"torch", "gguf", "safetensors", "numpy"} & set(sys.modules)))
"""


def test_the_digest_runner_computes_in_the_given_arena() -> None:
    spec = RunnerSpec(block_tokens=4, vocab_size=50)
    arena = memoryview(bytearray(4 * layout_of(spec).block_bytes))
    tokens = b"".join(token.to_bytes(4, "little") for token in range(6))
    item = StepItem(1, 0, 6, tokens, (2, 0), sample=True)
    result = open_runner(spec, arena, 4).run(Step(0, (item,)))
    assert list(result.items[0].tokens) == cold_output(tokens, 1, vocab_size=50)
    assert any(arena[:32]) and any(arena[64:96]) and not any(arena[32:64])


def test_the_layout_is_that_of_the_model() -> None:
    assert layout_of(RunnerSpec(block_tokens=8, window=True)) == digest_layout(8, window=True)


def test_a_wrong_spec_is_refused_by_name() -> None:
    for wrong in (0, 2**31):
        with pytest.raises(ConfigError, match=r"runner\.vocab_size must be at"):
            RunnerSpec(vocab_size=wrong)
    with pytest.raises(ConfigError, match=r"runner\.block_tokens must be at most 65536"):
        RunnerSpec(block_tokens=65_537)
    with pytest.raises(ConfigError, match=r"runner\.block_tokens"):
        RunnerSpec(block_tokens=0)
    with pytest.raises(msgspec.ValidationError, match="kind"):
        msgspec.json.decode(b'{"kind": "gpt"}', type=RunnerSpec)
    with pytest.raises(msgspec.ValidationError, match="speed"):
        msgspec.json.decode(b'{"speed": 1}', type=RunnerSpec)


def test_the_control_process_learns_the_layout_without_torch(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "model")
    out = subprocess.check_output([sys.executable, "-c", LAYOUT_SCRIPT, str(folder)], text=True)
    assert out.split() == [str(layout_of(RunnerSpec(kind="llama", model=str(folder))).block_bytes)]


def test_a_rack_without_the_packages_of_its_model_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = extra.find_spec
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(ResourceError, match=r"needs torch: pip install 'rackserve\[engine\]'"):
        LiveRack(RackConfig(), RunnerSpec(kind="llama"))
    LiveRack(RackConfig(), RunnerSpec(kind="digest"))
    require_packages(RunnerSpec(kind="digest"))


@pytest.mark.parametrize(
    ("library", "line"),
    [(libraries.by_itself, ""), (libraries.by_count, "in tiles of 16 rows"), (libraries.by_place, "row by row")],
)
def test_a_rank_says_in_one_line_if_it_must_cut_its_products(
    library: libraries.Scale, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    libraries.install(monkeypatch, library)
    spec = RunnerSpec(kind="llama", model=str(tiny.write_folder(tmp_path / "model")))
    with caplog.at_level(logging.INFO):
        open_runner(spec, memoryview(bytearray(2 * layout_of(spec).block_bytes)), 2)
    assert len(caplog.messages) == bool(line) and line in "".join(caplog.messages)


def test_a_rank_process_is_expected_to_hold_its_weights_in_float32(tmp_path: Path) -> None:
    weights = tiny.write_folder(tmp_path) / "model.safetensors"
    small_model.write_folder(tmp_path)
    expected = process_bytes(RunnerSpec(kind="llama", model=str(tmp_path)))
    assert expected - 2 * weights.stat().st_size == 400 * MIB
    assert process_bytes(RunnerSpec(kind="digest")) < 100 * MIB
