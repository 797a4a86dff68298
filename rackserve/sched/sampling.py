"""What an item tells the engine about choosing tokens beside its parameters, and what becomes of the tokens it chose."""

from __future__ import annotations

from msgspec import structs

from rackserve.base.errors import InvariantError
from rackserve.base.keys import TOKEN_BYTES
from rackserve.base.step import ItemResult, StepItem
from rackserve.sched.sequence import Sequence
from rackserve.sched.states import note_state


def describe(item: StepItem, sequence: Sequence) -> StepItem:
    """`item` of a sequence that `asks`, with what the engine must know to choose by the request, or to score its prompt."""
    request, tokens = sequence.request, sequence.tokens
    context = scored = b""
    full_from = item.full_from
    if item.sample and sequence.context_due:
        sequence.context_due = False
        context = tokens[0 if request.sampling.reads_prompt else len(tokens) - item.output_index :].tobytes()
    if request.scores_prompt and item.start < request.num_tokens:
        first = item.start + 1
        scored = request.tokens[first * TOKEN_BYTES : (first + item.num_tokens) * TOKEN_BYTES]
        full_from = 0  # every position has its say
    ends = request.stop_token_ids if request.sampling.min_tokens and not request.ignore_eos else ()
    return structs.replace(
        item,
        context=context,
        stop_token_ids=ends,
        scored=scored,
        scored_top=max(0, request.prompt_logprobs),
        full_from=full_from,
    )


def take(sequence: Sequence, item: StepItem, done: ItemResult, block_tokens: int) -> tuple[int, ...]:
    """Count the positions of a finished item and append its tokens up to a stop token or the limit; returns those."""
    if item.sample and not done.tokens and done.finish is None:
        raise InvariantError(f"the engine returned no token for {sequence.key} at position {item.start}")
    request, tokens = sequence.request, done.tokens
    accepted = tokens[: max(1, request.max_tokens - len(sequence.outputs))]
    if request.stop_token_ids and not request.ignore_eos:
        stop = next((at for at, token in enumerate(accepted) if token in request.stop_token_ids), None)
        if stop is not None:
            accepted = accepted[: stop + 1]
            sequence.finish = "stop"
    if sequence.finish is None and len(accepted) == len(tokens):
        sequence.finish = done.finish
    if sequence.finish is None and len(sequence.outputs) + len(accepted) >= request.max_tokens and accepted:
        sequence.finish = "length"
    sequence.computed = item.start + item.num_tokens + max(0, len(accepted) - 1)
    sequence.scheduled = max(sequence.scheduled, sequence.computed)
    note_state(sequence, item, block_tokens)
    sequence.outputs.extend(accepted)
    sequence.logprobs.extend(done.logprobs[: len(accepted)])
    sequence.prompt_logprobs.extend(done.prompt_logprobs)
    if request.tokens:
        sequence.tokens.extend(accepted)
    over = sequence.finish is not None or len(sequence.outputs) >= sequence.max_outputs
    if sequence.in_flight == 0 and sequence.state == "running" and not over:
        sequence.move("ready")
    return accepted
