"""What an output must be (a JSON schema, a regular expression, a grammar, a choice), as the tokens that may come next.

Depends on the package `llguidance`, which compiles lazily and counts its work, so that any constraint is refused or ready soon.
"""

from __future__ import annotations

import json

import llguidance
import msgspec

from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint
from rackserve.text.tokenizer import Tokenizer, unpack

MAX_TEXT_BYTES = 256 << 10
"""Of a constraint; more is refused unread."""

WHITE_SPACE = r"[ \n\t]{0,32}"
"""Between the parts of JSON. Bounded, for a weak model may never stop writing it."""

_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=1_000_000, max_grammar_size=200_000, verbose_errors=False)


class Matcher:
    """A place in what a constraint allows; it begins before the first token of the output."""

    __slots__ = ("_known", "_length", "_matcher")

    def __init__(self, matcher: llguidance.LLMatcher, known: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._known = known  # ids from there on have no text
        self._length = (vocab_size + 31) // 32 * 4

    @property
    def is_done(self) -> bool:
        """Whether the output is complete and nothing may follow but its end."""
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        """What may come next: a bit for each id of the vocabulary, the lowest bit of a byte first, in 32-bit words.

        Ids that end an answer may come where the output is complete. Raises RequestError if working this out takes too much.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask[: self._length].ljust(self._length, b"\0")

    def accept(self, token: int) -> None:
        """Go on by `token`. Raises RequestError, and stays where it is, if it may not come next."""
        if not 0 <= token < self._known or self._matcher.try_consume_tokens([token]) != 1:
            self._check()
            raise RequestError(
                f"token {token} may not come next under the constraint of the request", code="constraint_violated"
            )

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens accepted."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise RequestError(f"cannot take back {num_tokens} tokens under the constraint of the request")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the constraint takes too much work: {_first_line(self._matcher)}", code="constraint_too_complex"
            )


class ConstraintCompiler:
    """Makes matchers over one vocabulary. Building it takes about a second of CPU for 129 k ids; safe for several threads.

    vocab_size  ids of the model, which may be more than the tokenizer's; the others are never allowed
    """

    __slots__ = ("_environment", "_vocab_size")

    def __init__(self, vocabulary: Tokenizer, *, vocab_size: int | None = None, eos_ids: tuple[int, ...] | None = None) -> None:
        ends = list(vocabulary.eos_ids if eos_ids is None else eos_ids)
        self._vocab_size = vocab_size or vocabulary.vocab_size
        self._environment = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Spellings(vocabulary, ends)), n_vocab=self._vocab_size, eos_token=ends
        )

    def __call__(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning.

        Raises RequestError (code `invalid_constraint`) for a constraint that is malformed, too large, or that no output meets.
        Takes less than a second whatever it is given, the same on every machine: work is counted, not timed.
        """
        if len(constraint.text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
            raise _invalid(constraint, f"is longer than {MAX_TEXT_BYTES} bytes")
        matcher = llguidance.LLMatcher(self._environment, _grammar(constraint), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            possible = any(matcher.compute_bitmask())
            if not matcher.is_error() and not possible:
                raise _invalid(constraint, "can never be met")
        if matcher.is_error():
            raise _invalid(constraint, _first_line(matcher))
        return Matcher(matcher, self._environment.vocab_size, self._vocab_size)


class _Spellings:
    """A vocabulary in the form that `llguidance` reads."""

    def __init__(self, vocabulary: Tokenizer, ends: list[int]) -> None:
        self._vocabulary = vocabulary
        self.bos_token_id = None
        self.eos_token_id = ends[0] if ends else 0
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.tokens = [vocabulary.spelling(number) for number in range(vocabulary.vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return list(unpack(self._vocabulary.encode(text)))


def _grammar(constraint: Constraint) -> str:
    try:
        if constraint.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(constraint.text)
        if constraint.kind == "grammar":
            return llguidance.LLMatcher.grammar_from_lark(constraint.text)
        if constraint.kind == "choice":
            choices = msgspec.json.decode(constraint.text, type=list[str])
            if not choices or not all(choices):
                raise _invalid(constraint, "must be one or more strings, none of them empty")
            return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        schema = '{"type": "object"}' if constraint.kind == "json_object" else constraint.text
        return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITE_SPACE})
    except (ValueError, UnicodeEncodeError, RecursionError, msgspec.MsgspecError) as error:
        raise _invalid(constraint, str(error)) from error


def _first_line(matcher: llguidance.LLMatcher) -> str:
    text = matcher.get_error().strip().partition("\n")[0]
    return "can never be met" if text.startswith("NoExtension") else text[:200]


def _invalid(constraint: Constraint, reason: str) -> RequestError:
    return RequestError(f"the {constraint.kind} {reason}", code="invalid_constraint")
