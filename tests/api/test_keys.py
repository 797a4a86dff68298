from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.api.call import Caller
from rackserve.api.keys import KeyEntry, KeyRing, key_in, new_key, salt_of
from rackserve.base.errors import ConfigError, FileFormatError


def test_a_new_key_opens_and_its_file_does_not_hold_it(tmp_path: Path) -> None:
    key, entry = new_key("ci", 'team "a"', admin=True)
    path = tmp_path / "keys.toml"
    path.write_text(entry + new_key("other")[1])
    ring = KeyRing.open(str(path), "given-key")
    assert key not in entry and hashlib.sha256(key.encode()).hexdigest() in entry
    assert ring.find(key) == Caller('team "a"', True, "ci") and ring.find("given-key") == Caller("", True, "given")
    for wrong in ("", key[:-1], key + "x", key.upper(), "ключ", "\ud800"):
        assert ring.find(wrong) is None


def test_without_keys_there_is_no_ring() -> None:
    assert not KeyRing.open("") and KeyRing.open("", "k")


@pytest.mark.parametrize(
    "text", ["", "keys = 3", "[[keys]]\nname = 'a'\nsha256 = 'x'", "[[keys]]\nname='a'\nsha256='%s'\nmore=1" % ("0" * 64), "["]
)
def test_a_key_file_that_cannot_be_read_names_itself(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match="keys"):
        KeyRing.open(str(path))
    with pytest.raises(FileFormatError, match="missing"):
        KeyRing.open(str(tmp_path / "missing.toml"))


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="'a'"):
        KeyRing([KeyEntry("a", "0" * 64), KeyEntry("a", "1" * 64)])


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"authorization": "Basic k"}, ""),
        ({"authorization": "Bearer", "x-api-key": "x"}, "x"),
        ({"authorization": "Bearer a", "x-api-key": "x"}, "a"),
    ],
)
def test_a_key_is_taken_from_where_clients_put_it(headers: dict[str, str], key: str) -> None:
    assert key_in(headers) == key


TEXTS = st.text("ab\0", max_size=3)


@given(st.tuples(TEXTS, TEXTS), st.tuples(TEXTS, TEXTS))
@settings(derandomize=True, max_examples=500, deadline=None)
def test_no_two_tenants_or_wishes_share_a_salt_and_none_can_be_made_up(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (salt_of(b"s", *one) == salt_of(b"s", *other)) == (one == other)
    assert one == ("", "") or salt_of(b"s", *one) != salt_of(b"t", *one)


def test_a_key_file_is_read_again_and_says_which_keys_are_not_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    (kept, kept_entry), (gone, gone_entry), (old, old_entry) = (new_key(name, "t") for name in ("kept", "gone", "changed"))
    path.write_text(kept_entry + gone_entry + old_entry)
    ring = KeyRing.open(str(path), "given-key")
    new, new_entry = new_key("changed", "t")
    added, added_entry = new_key("added")
    path.write_text(kept_entry + new_entry + added_entry)
    assert len(ring) == 4 and ring.reload() == {"gone", "changed"} and len(ring) == 4
    assert [ring.find(key) is not None for key in (kept, gone, old, new, added, "given-key")] == [True, False, False] + [
        True
    ] * 3
    assert ring.reload() == frozenset()


@pytest.mark.parametrize("text", ["[[keys]", "keys = []", "[[keys]]\nname = 'a'\nsha256 = 'x'", None])
def test_a_key_file_that_cannot_be_taken_over_leaves_the_keys_as_they_were(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, entry = new_key("kept", "t")
    path.write_text(entry)
    ring = KeyRing.open(str(path))
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises((FileFormatError, ConfigError), match=r"keys\.toml"):
        ring.reload()
    assert ring.find(key) == Caller("t", False, "kept")
