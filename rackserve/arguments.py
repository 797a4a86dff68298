"""Reads numbers from the command line and refuses what they may not be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number that is not below `least`."""

    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        return number

    read.__name__ = "whole number"  # argparse's word for it when `text` is none
    return read


def whole_within(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, both included."""

    def read(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {text}")
        return number

    read.__name__ = "whole number"
    return read


def number_within(least: float, most: float) -> Callable[[str], float]:
    """Reads a number from `least` to `most`, both included."""

    def read(text: str) -> float:
        number = float(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}, got {text}")
        return number

    read.__name__ = "number"  # argparse's word for it when `text` is none
    return read


def whole_numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads whole numbers with commas between, none below `least` and none twice."""
    read_one = at_least(least)

    def read(text: str) -> tuple[int, ...]:
        numbers = tuple(read_one(part) for part in text.split(","))
        if len(set(numbers)) < len(numbers):
            raise argparse.ArgumentTypeError(f"must differ from each other, got {text}")
        return numbers

    read.__name__ = "list of whole numbers"
    return read


def name_and_value(text: str) -> tuple[str, str]:
    """Reads NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def add_address(command: argparse.ArgumentParser) -> None:
    """`--model`, `--host` and `--port`, for commands that serve or look whether it can be done."""
    command.add_argument(
        "--model", help="embedded (default), golden, or a folder with a Llama or DeepSeek-V4.1 model in Hugging Face form"
    )
    command.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (default 8000; 0: any free one)")


def address_overrides(options: argparse.Namespace) -> list[str]:
    """What the options of `add_address` say, as further values of `--set`."""
    flags = {"runner.model": options.model, "server.host": options.host, "server.port": options.port}
    if options.model is not None:
        from rackserve.model.files import kind_of

        flags["runner.kind"] = kind_of(options.model)
    return [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]


def add_settings(command: argparse.ArgumentParser) -> None:
    """`--config` and `--set`, for commands that read all settings."""
    command.add_argument("--config", metavar="FILE", help="settings in TOML or YAML")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="overrides",
        help="one setting, such as router.policy=least_load",
    )
