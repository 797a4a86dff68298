"""What a real model draws on a rack of processes: one seed, one output, whoever is beside it and whatever is cached."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rackserve.assemble import RackConfig
from rackserve.base.ids import FRONTEND
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.base.messages import Message, Output, Submit
from rackserve.base.request import Constraint, Request, SamplingParams
from rackserve.base.step import CONSTRAINT_INVALID
from rackserve.base.topology import Topology
from rackserve.live.rack import LiveRack
from rackserve.live.runner import RunnerSpec
from rackserve.model.files import open_model
from rackserve.text.tokenizer import Tokenizer, unpack

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

BLOCK = 16
SPEC = RunnerSpec(kind="llama", model="embedded", dtype="fp32", block_tokens=BLOCK)
TOPOLOGY = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=40, decode_blocks=40, segment_blocks=40)


class Client:
    """Node `api`: sends requests and keeps what comes back."""

    def __init__(self, rack: LiveRack) -> None:
        self._rack = rack
        self._outputs: dict[str, list[Output]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        rack.add_node("api", self)

    def handle(self, message: Message) -> None:
        assert isinstance(message, Output)
        self._outputs[message.request].append(message)
        if message.finish or message.error:
            self._ends[message.request].set()

    async def ask(self, tokens: bytes, max_tokens: int = 6, **fields: Any) -> list[Output]:
        """All output of a request."""
        name = f"r{len(self._outputs)}"
        root = CacheNamespace("m", "0", BLOCK, self._rack.layout.fingerprint()).root()
        chain = extend_chain(b"", root, tokens, BLOCK)
        self._outputs[name], self._ends[name] = [], asyncio.Event()
        request = Request(name, name, tokens, chain, len(tokens) // 4, max_tokens, root=root, **fields)
        self._rack.transport_for("api").send(FRONTEND, Submit(request, "api"))
        await self._ends[name].wait()
        return self._outputs[name]


def tokens_of(outputs: list[Output]) -> list[int]:
    assert outputs[-1].error is None, outputs[-1].detail
    return [token for output in outputs for token in output.tokens]


def on_rack(trial: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with LiveRack(RackConfig(topology=TOPOLOGY), SPEC) as rack:
            await trial(Client(rack))

    asyncio.run(run())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(open_model("embedded").path)


SEEDED = SamplingParams(temperature=1.0, seed=7, presence_penalty=0.5, repetition_penalty=1.2, min_p=0.01)


def test_a_seeded_request_draws_the_same_alone_among_others_and_from_a_warm_cache(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(
        "The sky over the harbour was the colour of a television that nobody had switched on for years, and"
    )

    async def trial(client: Client) -> None:
        alone = tokens_of(await client.ask(prompt, sampling=SEEDED, logprobs=0))
        others = [
            client.ask(array("i", range(number * 50, number * 50 + 9 + number)).tobytes(), sampling=SamplingParams(1.0))
            for number in range(1, 5)
        ]
        beside = await asyncio.gather(client.ask(prompt, sampling=SEEDED), *others)
        assert tokens_of(beside[0]) == alone
        usage = beside[0][-1].usage
        assert usage is not None and usage.cached_tokens == (len(prompt) // 4 - 1) // BLOCK * BLOCK > 0
        assert tokens_of(await client.ask(prompt)) != alone

    on_rack(trial)


def test_scores_of_a_prompt_are_the_same_with_a_cold_and_a_warm_cache(tokenizer: Tokenizer) -> None:
    prompt = array("i", (tokenizer_ids := unpack(tokenizer.encode("one two three four " * 20)))[: 3 * BLOCK + 1]).tobytes()
    assert len(tokenizer_ids) > 3 * BLOCK

    async def trial(client: Client) -> None:
        plain = await client.ask(prompt)
        scored = [await client.ask(prompt, prompt_logprobs=2) for _ in range(2)]
        warm = await client.ask(prompt)
        found = [outputs[0].prompt_logprobs for outputs in scored]
        assert found[0] == found[1] and len(found[0]) == 3 * BLOCK
        assert all(len(score.top) == 2 and score.logprob <= score.top[0][1] for score in found[0])
        assert not any(output.prompt_logprobs for outputs in scored for output in outputs[1:])
        usages = [outputs[-1].usage for outputs in (plain, *scored, warm)]
        assert [usage.cached_tokens for usage in usages if usage is not None] == [0, 0, 0, 3 * BLOCK]
        assert tokens_of(plain) == tokens_of(scored[0]) == tokens_of(warm)

    on_rack(trial)


def test_output_is_what_its_constraint_wants_and_a_constraint_that_is_none_fails_alone(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("A colour, as JSON: ")
    schema = '{"type":"object","properties":{"name":{"enum":["red","blue"]},"n":{"type":"integer"}},"required":["name","n"]}'

    async def trial(client: Client) -> None:
        def asked(constraint: Constraint, seed: int = 1) -> Any:
            stops = {"stop_token_ids": tokenizer.eos_ids}
            return client.ask(prompt, 40, sampling=SamplingParams(1.0, seed=seed, constraint=constraint), **stops)

        broken, choice, pattern, *found = await asyncio.gather(
            asked(Constraint("regex", "(")),
            asked(Constraint("choice", '["north", "south-west"]')),
            asked(Constraint("regex", "[0-9]{3}-[0-9]{4}")),
            *(asked(Constraint("json_schema", schema), seed) for seed in range(3)),
        )
        assert broken[-1].error == CONSTRAINT_INVALID
        assert tokenizer.decode(tokens_of(choice)) in ("north", "south-west")
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", tokenizer.decode(tokens_of(pattern)))
        assert {outputs[-1].finish for outputs in (choice, pattern)} == {"stop"}
        for outputs in found:
            if outputs[-1].finish == "stop":
                value = json.loads(tokenizer.decode(tokens_of(outputs)))
                assert value["name"] in ("red", "blue") and isinstance(value["n"], int)
        assert "stop" in {outputs[-1].finish for outputs in found}

    on_rack(trial)
