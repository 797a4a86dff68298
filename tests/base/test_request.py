"""A request is immutable and knows how much of it the client sent."""

from __future__ import annotations

import msgspec
import pytest

from rackserve.base.ids import Rank
from rackserve.base.request import Constraint, Placement, Request, SamplingParams, Usage


def test_delivered_output_is_not_part_of_the_prompt_the_client_sent() -> None:
    request = Request("r", "s", b"", b"", 12, 4, attempt=2, num_emitted=3)
    assert (request.num_prompt_tokens, request.key) == (9, ("r", 2))
    assert Placement("r", 2, Rank("prefill0"), Rank("decode0"), 0, 12).key == request.key


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Request("r", "s", b"", b"", 1, 1).attempt = 2  # type: ignore[misc]


def test_fields_left_at_their_defaults_cost_no_bytes() -> None:
    plain = Request("r", "s", b"", b"", 1, 1)
    seeded = Request("r", "s", b"", b"", 1, 1, sampling=SamplingParams(seed=7))
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    assert len(encode(plain)) < len(encode(seeded)) < 120
    assert decode(encode(seeded), type=Request) == seeded


def test_usage_is_compared_by_content() -> None:
    assert Usage(10, 4, 2) == Usage(10, 4, 2) != Usage(10, 5, 2)


FIELDS = [
    SamplingParams(temperature=0.5, top_p=0.9, top_k=3, seed=1, min_p=0.1),
    SamplingParams(logit_bias=((1, 2.0),), min_tokens=2, allowed_token_ids=(1, 2), bad_words=((3,),)),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(bad_words=((3, 4),)),
    SamplingParams(constraint=Constraint("choice", '["a"]')),
    SamplingParams(repetition_penalty=1.1),
]


@pytest.mark.parametrize(("sampling", "reads"), list(zip(FIELDS, ["", "", "o", "o", "o", "o", "po"], strict=True)))
def test_a_request_says_on_what_its_choices_depend(sampling: SamplingParams, reads: str) -> None:
    assert (sampling.reads_prompt, sampling.reads_output) == ("p" in reads, "o" in reads)
    assert sampling.changes_logits == (sampling is not FIELDS[0])
    assert msgspec.json.decode(msgspec.json.encode(sampling), type=SamplingParams) == sampling


def test_log_probabilities_of_the_prompt_are_wanted_once() -> None:
    wanted = Request("r", "s", b"", b"", 9, 4, prompt_logprobs=0)
    assert wanted.scores_prompt
    assert not msgspec.structs.replace(wanted, num_emitted=1).scores_prompt
    assert not Request("r", "s", b"", b"", 9, 4).scores_prompt
