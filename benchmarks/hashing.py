"""Block keys of a 142 k-token prompt: what naming KV costs beside copying and hashing the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b, shake_128

from measure import CPU_TIME, Figure, Options, Result, at_most, figure, interleave, main, ns_per_call, rate

from rackserve.base.keys import TOKEN_BYTES, CacheNamespace, extend_chain, prefix

NUM_TOKENS = 142_080
NEW_TOKENS = 2_048
BLOCKS = (16, 64, 256)


def run(options: Options) -> Result:
    num_tokens = NUM_TOKENS // 10 if options.quick else NUM_TOKENS
    calls = 2 if options.quick else 10
    tokens = shake_128(str(options.seed).encode()).digest(num_tokens * TOKEN_BYTES)
    variants: dict[str, Callable[[], float]] = {
        "memcpy": partial(ns_per_call, lambda: bytearray(tokens), calls),
        "blake2b": partial(ns_per_call, lambda: blake2b(tokens, digest_size=16).digest(), calls),
    }
    for block in BLOCKS:
        root = CacheNamespace("m", "0", block, "").root()
        whole = extend_chain(b"", root, tokens, block)
        known = prefix(whole, (num_tokens - NEW_TOKENS) // block)
        variants[f"whole {block}"] = partial(ns_per_call, partial(extend_chain, b"", root, tokens, block), calls)
        variants[f"new {block}"] = partial(ns_per_call, partial(extend_chain, known, root, tokens, block), calls * 10)
    ns = interleave(variants, options.rounds)
    plain, copy = "hashing the buffer in one go", "copying the buffer"
    figures = [
        figure(f"copying {num_tokens:,} token ids", "µs", ns["memcpy"], scale=1e-3),
        figure(f"BLAKE2b of {num_tokens:,} token ids in one go", "µs", ns["blake2b"], copy, ns["memcpy"], 1e-3),
    ]
    parts = {block: _of_block(block, num_tokens, ns, plain, copy) for block in BLOCKS}
    figures += [part for of_block in parts.values() for part in of_block]
    claims = [
        at_most(f"naming all blocks of {block} tokens takes at most twice as long as {plain}", whole.ratios, 2)
        for block, (whole, _, _) in parts.items()
    ]
    claims += [
        at_most(
            f"blocks of {block} tokens: a turn pays for its new tokens only, to a factor of 2",
            new.ratios,
            2 * NEW_TOKENS / num_tokens,
        )
        for block, (_, _, new) in parts.items()
    ]
    question = "What does naming the blocks of a 142 k-token prompt cost, beside copying and hashing the same bytes?"
    return Result("hashing", question, CPU_TIME, tuple(claims), tuple(figures))


def _of_block(block: int, num_tokens: int, ns: dict[str, list[float]], plain: str, copy: str) -> list[Figure]:
    whole, new = ns[f"whole {block}"], ns[f"new {block}"]
    return [
        rate(f"whole chain, blocks of {block}", "M tokens/s", whole, num_tokens / 1e6, plain, ns["blake2b"]),
        figure(f"whole chain, blocks of {block}", "µs", whole, copy, ns["memcpy"], 1e-3),
        figure(f"{NEW_TOKENS:,} new tokens after the rest, blocks of {block}", "µs", new, "the whole chain", whole, 1e-3),
    ]


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
