"""The command `key`: makes an API key. The key goes to whoever is to use it, the entry into the server's key file."""

from __future__ import annotations

import argparse
import sys

from rackserve.api.keys import new_key
from rackserve.base.errors import ConfigError


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("name", help="whose key it is, as logs tell it")
    command.add_argument("--tenant", default="", help="whose cache its requests share (default: that of keys without tenant)")
    command.add_argument(
        "--admin", action="store_true", help="the key may use routes under /admin/, of which there is none yet"
    )


def key(options: argparse.Namespace) -> int:
    """Print the key to standard error and its entry to standard output, so that `>> FILE` keeps the key out of the file.

    Raises ConfigError for a name that a key file would not take.
    """
    if not 1 <= len(options.name) <= 100 or len(options.tenant) > 200:
        raise ConfigError("a key's name has 1 to 100 characters, its tenant at most 200")
    if not (options.name + options.tenant).isprintable():
        raise ConfigError("a key's name and tenant have printable characters only")
    secret, entry = new_key(options.name, options.tenant, admin=options.admin)
    print(f"key, shown this once: {secret}", file=sys.stderr)
    print(entry, end="")
    return 0
