"""The command `config`: what holds and where it comes from, and what a setting means."""

from __future__ import annotations

import argparse
import os
import re
import typing

import msgspec

from rackserve.arguments import add_settings
from rackserve.base.errors import ConfigError
from rackserve.config import Resolved, Settings, flatten, resolve
from rackserve.hints import ELSEWHERE, hint_for_setting


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("what", choices=["show", "explain"], help="show all settings as they come out, or explain one")
    command.add_argument("key", nargs="?", help="explain: a setting such as server.port, or a section")
    command.add_argument("--origin", action="store_true", help="show: where each value is from")
    add_settings(command)


def config(options: argparse.Namespace) -> int:
    """Print to standard output."""
    resolved = resolve(options.config, options.overrides, environment=os.environ)
    if options.what == "show":
        print("\n".join(show(resolved, origin=options.origin)))
        return 0
    if not options.key:
        raise ConfigError("config explain needs a setting, such as `rackserve config explain server.port`")
    print("\n".join(explain(options.key.lstrip("-"), resolved)))
    return 0


def show(resolved: Resolved, *, origin: bool) -> list[str]:
    """One `section.key = value` a line; a start of slots for resume state (see `Settings.sized`) is not in it."""
    lines = []
    for name, value in flatten(msgspec.to_builtins(resolved.settings)):
        line = f"{name} = {msgspec.json.encode(value).decode()}"
        lines.append(f"{line:<60}  # {resolved.origins.get(name, 'default')}" if origin else line)
    return lines


def explain(key: str, resolved: Resolved) -> list[str]:
    """What a setting means, its value, default and origin; of a section, what its settings mean. Raises ConfigError."""
    values, defaults = (dict(flatten(msgspec.to_builtins(each))) for each in (resolved.settings, Settings()))
    name = key.replace("-", "_")
    if name in values:
        section, _, field = name.rpartition(".")
        meaning = meanings(_kind_of(section)).get(field, "")
        variable = f"RACKSERVE_{name.upper().replace('.', '__')}"
        shown, default = (msgspec.json.encode(each[name]).decode() for each in (values, defaults))
        return [
            f"{name} = {shown}   # {resolved.origins.get(name, 'default')}",
            *([f"  {meaning}"] if meaning else []),
            f"  default: {default}",
            f"  set it with --set {name}=VALUE, {variable}=VALUE or a file given with --config",
        ]
    if any(other.startswith(f"{name}.") for other in values):
        own = [other for other in values if other.startswith(f"{name}.")]
        told = meanings(_kind_of(name))
        return [f"{other:<36} {told.get(other.rpartition('.')[2], '')}".rstrip() for other in own]
    if key in ELSEWHERE:
        return [f"--{key} of other servers: here it is {ELSEWHERE[key]}"]
    raise ConfigError(f"there is no setting {key}{hint_for_setting(key, values) or ';'} `rackserve config show` lists all")


def meanings(kind: type) -> dict[str, str]:
    """What a class of settings says of its fields in the lists of its docstring, and in those it is built on."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        names: list[str] = []
        for line in (each.__doc__ or "").splitlines():
            head = re.match(r"    (\w+(?:, \w+)*)  +(\S.*)", line)
            if head:
                names = head[1].split(", ")
                found |= dict.fromkeys(names, head[2])
            elif re.match(r"     +\S", line) and names:
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            else:
                names = []
    return found


def _kind_of(section: str) -> type:
    """The class of a section; of "", that of all."""
    kind: type = typing.get_type_hints(Settings)[section] if section else Settings
    return kind
