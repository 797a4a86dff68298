"""`rackserve route`: a router in front of servers that others wrote."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal

import msgspec

from rackserve.api.server import listen, serve
from rackserve.base.errors import RackserveError
from rackserve.relay.config import RouteConfig, read_config
from rackserve.relay.door import Door
from rackserve.relay.http import create_app
from rackserve.relay.relay import Relay

_log = logging.getLogger("rackserve.route")


def route(options: argparse.Namespace) -> int:
    """Run the router until it is told to stop."""
    changes = {name: getattr(options, name) for name in ("host", "port", "tokenizer", "block_tokens", "pairs")}
    config = read_config(options.config, options.workers, changes)
    if options.policy is not None:
        router = {**msgspec.structs.asdict(config.router), "policy": options.policy}
        config = msgspec.structs.replace(config, router=type(config.router)(**router))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one prompt at a time: its threads would only wait for each other
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would tell of every look at a worker's health
    return asyncio.run(_route(config))


async def _route(config: RouteConfig) -> int:
    door = Door.open(config, os.environ)
    listener = listen(config.host, config.port)
    relay = Relay(config, door)
    stop = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if config.security.key_file:
        loop.add_signal_handler(signal.SIGHUP, _reload, door)
    host, port = listener.getsockname()[:2]
    workers = f"{len(config.workers)} worker{'s' * (len(config.workers) != 1)}"
    asked = "a key is asked for" if door.keys else "no key is asked for"
    print(f"routing to {workers} on http://{host}:{port} ({asked}; Ctrl-C to stop)", flush=True)
    try:
        await serve(create_app(relay), listener, gateway=relay, state=relay, stop=stop, grace_s=config.waits.grace)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return 0


def _reload(door: Door) -> None:
    """Take the key file over as it is now, if it can be."""
    try:
        gone = door.keys.reload()
    except RackserveError as error:
        _log.warning("the key file is not taken over: %s", error)
    else:
        _log.info("the key file was read again; keys: %d, gone: %d", len(door.keys), len(gone))
