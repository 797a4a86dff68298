from __future__ import annotations

import argparse

import pytest

from rackserve.arguments import (
    add_address,
    address_overrides,
    at_least,
    name_and_value,
    number_within,
    whole_numbers,
    whole_within,
)


def test_numbers_are_read_within_their_limits() -> None:
    assert (at_least(2)("2"), number_within(0, 1)("0.5"), whole_numbers(1)("1,2,8")) == (2, 0.5, (1, 2, 8))
    assert (whole_within(2, 3)("2"), whole_within(2, 3)("3")) == (2, 3)
    for read, text in (
        (at_least(2), "1"),
        (whole_within(2, 3), "1"),
        (whole_within(2, 3), str(2**64 + 2)),
        (number_within(0, 1), "1.5"),
        (number_within(0, 1), "nan"),
        (whole_numbers(1), "4,0"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            read(text)
    with pytest.raises(argparse.ArgumentTypeError, match="differ from each other, got 1,1"):
        whole_numbers(1)("1,1")
    for read in (at_least(0), whole_within(0, 1), whole_numbers(0)):
        with pytest.raises(ValueError, match="invalid literal"):
            read("many")
        assert "whole number" in read.__name__


def test_a_name_and_its_value_are_split_at_the_first_equals_sign() -> None:
    assert name_and_value("a=b=c") == ("a", "b=c")
    assert name_and_value("a=") == ("a", "")
    for text in ("a", "=b", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
            name_and_value(text)


def test_an_address_and_a_model_with_its_kind_are_settings() -> None:
    parser = argparse.ArgumentParser()
    add_address(parser)
    assert address_overrides(parser.parse_args([])) == []
    given = parser.parse_args(["--model", "golden", "--port", "0"])
    assert sorted(address_overrides(given)) == ['runner.kind="deepseek_v41"', 'runner.model="golden"', "server.port=0"]
