"""Options of `rackserve route`."""

from __future__ import annotations

import argparse


def add_route(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument(
        "--worker",
        action="append",
        default=[],
        dest="workers",
        metavar="URL[,NAME=VALUE...]",
        help="a server, with what it has: role=prefill|decode, dp_ranks=N, events=tcp://HOST:PORT, replay=tcp://HOST:PORT, "
        "capacity_tokens=N, bootstrap_port=N; may be given several times",
    )
    command.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (default 8080; 0: any free one)")
    command.add_argument(
        "--tokenizer", metavar="FOLDER", help="the workers' model folder, or numbers; needed for KV events (default: by text)"
    )
    command.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens of a KV block of the workers (default 16; 128 by text)"
    )
    command.add_argument("--pairs", choices=["vllm", "sglang"], help="how pairs of workers are asked (default vllm)")
    command.add_argument("--policy", help="placement policy (default least_uncached_work)")
    command.add_argument("--config", metavar="FILE", help="all settings in YAML; see docs/routing.md")
    command.epilog = (
        "Keys come from the environment: RACKSERVE_API_KEY is what clients must send (security.key_file in --config names "
        "several), RACKSERVE_WORKER_KEY what the servers ask for. Without either, clients' own keys go on to the servers."
    )
