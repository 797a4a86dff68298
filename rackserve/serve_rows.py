"""The command `serve-rows`: own one shard of a model's Engram tables and hand out its rows to ranks, here or elsewhere."""

from __future__ import annotations

import argparse
import signal
import threading

from rackserve.arguments import at_least
from rackserve.base.errors import ConfigError
from rackserve.model.files import open_model


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--model", required=True, help="folder of the model, or golden")
    command.add_argument("--shard", type=at_least(0), default=0, metavar="I", help="which shard, from 0 (default 0)")
    command.add_argument("--of", type=at_least(1), default=1, metavar="N", help="into how many the tables are cut (default 1)")
    command.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="ipc://@name, ipc:///path or tcp://host:port, then #FILE for the secret in FILE; a must beyond this machine",
    )


def serve_rows(options: argparse.Namespace) -> int:
    """Serve shard `--shard` of `--of` at `--listen` until SIGTERM or Ctrl-C."""
    if not 0 <= options.shard < options.of:
        raise ConfigError(f"--shard is {options.shard}: of {options.of} shards the first is 0, the last {options.of - 1}")
    from rackserve.model.deepseek_v41.checkpoint import open_checkpoint
    from rackserve.model.deepseek_v41.engram.links import MappedLink
    from rackserve.model.deepseek_v41.engram.sockets import ShardServer
    from rackserve.model.deepseek_v41.engram.tables import open_tables

    files = open_model(options.model)
    config = files.deepseek_v41
    link = MappedLink(open_tables(open_checkpoint(files.path, config).location, config), options.of, options.shard)
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    with ShardServer(options.listen, link) as server:
        for layer, rows in link.owned.items():
            print(f"layer {layer}: rows {rows.start} to {rows.stop - 1}")
        print(f"serving at {server.address}", flush=True)
        end.wait()
    return 0
