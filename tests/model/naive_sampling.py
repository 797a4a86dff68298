"""The law of the next token as a page of plain Python, and a toy constraint: one of some lists of token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint, SamplingParams


def naive_law(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stops: Sequence[int] = (),
) -> list[float]:
    """Probability of each token after `prompt` and `output`; all 0 if none may follow."""
    z, output = list(logits), list(output)
    allowed = set(sampling.allowed_token_ids) or set(range(len(z)))
    if sampling.constraint is not None:
        words = words_of(sampling.constraint)
        allowed &= set() if output in words else {word[len(output)] for word in words if follows(word, output)}
    for word in sampling.bad_words:
        if [*output, word[-1]][-len(word) :] == list(word):
            allowed -= {word[-1]}
    if len(output) < sampling.min_tokens:
        allowed -= set(stops)
    for token, bias in sampling.logit_bias:
        if token < len(z):
            z[token] += bias
    for token in range(len(z)):
        if token in prompt or token in output:
            z[token] = z[token] / sampling.repetition_penalty if z[token] > 0 else z[token] * sampling.repetition_penalty
        z[token] -= output.count(token) * sampling.frequency_penalty + (token in output) * sampling.presence_penalty
    order = sorted((token for token in range(len(z)) if token in allowed), key=lambda token: (-z[token], token))
    if not order:
        return [0.0] * len(z)
    if sampling.temperature == 0:
        return [float(token == order[0]) for token in range(len(z))]
    weight = {token: math.exp((z[token] - z[order[0]]) / sampling.temperature) for token in order}
    order = [token for token in order if weight[token] >= sampling.min_p][: sampling.top_k or None]
    total, kept = sum(weight[token] for token in order), list[int]()
    while order and sum(weight[token] for token in kept) <= sampling.top_p * total * (1 + 1e-12) and len(kept) < len(order):
        kept.append(order[len(kept)])
    whole = sum(weight[token] for token in kept)
    return [weight[token] / whole if token in kept else 0.0 for token in range(len(z))]


def one_of(*words: list[int]) -> Constraint:
    """That the output is one of these; none is the beginning of another."""
    return Constraint("choice", json.dumps(words))


def words_of(constraint: Constraint) -> list[list[int]]:
    words: list[list[int]] = json.loads(constraint.text)
    return words


def follows(word: Sequence[int], output: Sequence[int]) -> bool:
    return list(word[: len(output)]) == list(output)


class WordMatcher:
    """A place in one of the words."""

    def __init__(self, words: list[list[int]]) -> None:
        self.words, self.taken = words, list[int]()

    @property
    def is_done(self) -> bool:
        return self.taken in self.words

    def mask(self) -> bytes:
        bits = {word[len(self.taken)] for word in self.words if follows(word, self.taken) and len(word) > len(self.taken)}
        size = max(bits, default=0) // 8 + 1
        return sum(1 << bit for bit in bits).to_bytes(size, "little")

    def accept(self, token: int) -> None:
        if not any(follows(word, [*self.taken, token]) for word in self.words):
            raise RequestError(f"{token} does not follow {self.taken}")
        self.taken.append(token)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]


def compile_words(constraint: Constraint) -> WordMatcher:
    """RequestError for a constraint of another kind."""
    if constraint.kind != "choice":
        raise RequestError(f"{constraint.kind} is not a list of words")
    return WordMatcher(words_of(constraint))
