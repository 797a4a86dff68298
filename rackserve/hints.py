"""What a person who typed a wrong name may have meant: the nearest of ours, or ours for a name of another server."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

ELSEWHERE: dict[str, str] = {
    "served-model-name": "--set server.served_model_name=NAME",
    "tokenizer": "--set server.tokenizer=FOLDER",
    "api-key": "the environment variable RACKSERVE_API_KEY, or --set security.key_file=FILE",
    "max-model-len": "--set server.max_model_len=N",
    "context-length": "--set server.max_model_len=N",
    "max-num-seqs": "--set scheduler.max_sequences=N",
    "max-running-requests": "--set scheduler.max_sequences=N",
    "max-num-batched-tokens": "--set scheduler.max_batched_tokens=N",
    "chunked-prefill-size": "--set scheduler.max_batched_tokens=N",
    "block-size": "--set runner.block_tokens=N",
    "page-size": "--set runner.block_tokens=N",
    "kv-cache-dtype": "--set runner.dtype=bf16",
    "dtype": "--set runner.dtype=bf16",
    "seed": "--set seed=N",
    "tensor-parallel-size": "--set topology.prefill_tp=N and --set topology.decode_tp=N",
    "tp": "--set topology.prefill_tp=N and --set topology.decode_tp=N",
    "tp-size": "--set topology.prefill_tp=N and --set topology.decode_tp=N",
    "data-parallel-size": "--set topology.prefill_workers=N and --set topology.decode_workers=N",
    "dp-size": "--set topology.prefill_workers=N and --set topology.decode_workers=N",
    "enable-expert-parallel": "--set topology.prefill_ranks=N and --set topology.decode_ranks=N",
    "ep-size": "--set topology.prefill_ranks=N and --set topology.decode_ranks=N",
    "gpu-memory-utilization": "--set topology.prefill_blocks=N and --set topology.decode_blocks=N (KV is sized in blocks)",
    "mem-fraction-static": "--set topology.prefill_blocks=N and --set topology.decode_blocks=N (KV is sized in blocks)",
    "kv-transfer-config": "nothing: prefill and decode ranks and the pool are always connected; see --set topology.*",
    "disaggregation-mode": "nothing: prefill and decode ranks are always apart; see --set topology.*",
    "kv-events-config": "--set server.kv_events=tcp://HOST:PORT",
    "speculative-config": "--set scheduler.num_draft=N",
    "speculative-algorithm": "--set scheduler.num_draft=N",
    "enable-prefix-caching": "nothing: prefixes are always cached",
    "enable-chunked-prefill": "nothing: prefill is always in chunks of --set scheduler.max_batched_tokens=N",
    "enable-prompt-tokens-details": "nothing: cached tokens are always told",
    "enable-cache-report": "nothing: cached tokens are always told",
    "enable-metrics": "nothing: /metrics is always there",
    "enable-hierarchical-cache": "--set topology.pool=true (the default)",
    "enable-auto-tool-choice": "nothing: tools work whenever the model's template knows them",
    "tool-call-parser": "nothing: the parser comes with the model",
    "reasoning-parser": "nothing: the parser comes with the model",
    "trust-remote-code": "nothing: no code of a model is ever run",
    "shutdown-timeout": "--set server.grace=SECONDS",
    "shutdown-grace-period-secs": "--set server.grace=SECONDS",
    "max-num-queued-reqs": "--set router.max_queued_requests_per_rank=N",
    "max-num-queued-tokens": "--set router.max_queued_tokens_per_rank=N",
    "model-path": "--model FOLDER",
    "policy": "--set router.policy=NAME",
    "router-mode": "--set router.policy=NAME",
}
"""Flags of vLLM, SGLang and Dynamo, and what to write here."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`; "" if none is much like it."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.6)), "")


def hint_for_flag(flag: str, known: Iterable[str]) -> str:
    """What to say after "unknown option --flag"; "" if nothing helps."""
    there = [name for name in known if name.startswith("--")]
    name = flag.lstrip("-").replace("_", "-")
    if f"--{name}" in there:
        return f"; did you mean --{name}?"
    if name in ELSEWHERE and "--set" in there:
        return f"; here it is {ELSEWHERE[name]}"
    near = nearest(flag, there)
    return f"; did you mean {near}?" if near else ""


def hint_for_command(name: str, known: Iterable[str]) -> str:
    """What to say after "unknown command name"."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else "; `rackserve --help` lists all"


def hint_for_setting(name: str, known: Iterable[str]) -> str:
    """What to say after "unknown setting section.key"; `known` are whole names."""
    names = list(known)
    same_end = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    if name.replace("-", "_") in names:
        return f"; did you mean {name.replace('-', '_')}?"
    near = same_end[0] if len(same_end) == 1 else nearest(name, names)
    return f"; did you mean {near}?" if near else ""
