"""schemathesis against the API's own description: what it documents is taken, what it excludes is refused, nothing breaks."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from starlette.types import ASGIApp, Receive, Scope, Send

from rackserve.api.admission import DEADLINE, Admission
from rackserve.api.guard import Guard, Sessions
from rackserve.api.journal import RefusalLog
from rackserve.api.keys import KeyEntry, KeyRing
from rackserve.base.request import Request
from rackserve.text.constraints import ConstraintCompiler
from tests.api.rig import Rig, Script, text
from tests.text.small_model import small_tokenizer

pytestmark = pytest.mark.timeout(600)

KEY = {"authorization": "Bearer k"}


def _script(request: Request) -> Script:
    return text("ok", logprobs=max(request.logprobs, request.prompt_logprobs) >= 0)


def _served() -> ASGIApp:
    """The application as it is served, over a scripted rack."""
    rig = Rig(_script, max_model_len=4096, check=ConstraintCompiler(small_tokenizer()))
    count = rig.metrics.error_sent
    keys = KeyRing([KeyEntry("user", hashlib.sha256(b"k").hexdigest())])
    app = RefusalLog(Guard(Admission(rig.app, 100, count=count), keys, Sessions()), count)

    async def outlives_clients(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":  # each client starts and ends one, which would end the worker threads
            await app({**scope, "headers": [_put_off(*header) for header in scope["headers"]]}, receive, send)
            return
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    return outlives_clients


def _put_off(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A deadline that may be asked for, but has passed before anything can be done, would end every call: a later one."""
    try:
        soon = name == DEADLINE.encode() and 0 < float(value) < 60
    except ValueError:
        soon = False
    return (name, b"60") if soon else (name, value)


WHOLE = "RACKSERVE_CONFORMANCE"
"""Set to `whole` in the environment, it adds the cases that go through every bound of every field: three minutes."""

whole = os.environ.get(WHOLE) == "whole"
config = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": whole}}})
schema = schemathesis.openapi.from_asgi("/openapi.json", _served(), config=config, headers=KEY)


MEANING = {
    "messages": "only a text answer to a message before it can be gone on with; arguments must be JSON",
    "input": "some item of it must be one that the model can read; arguments must be JSON",
    "max_tokens": "0 only with echo",
    "max_completion_tokens": "may not differ from max_tokens",
    "prompt": "ids have to be of the vocabulary; /tokenize takes one text at a time; the context must hold it",
    "response_format": "a schema has to be one that can be kept to, and not beside structured_outputs",
    "structured_outputs": "likewise, and one at a time",
    "output_config": "likewise",
    "text": "likewise",
    "tool_choice": "names one of the tools; not every model can be made to call",
    "tools": "kinds of others are up to them",
    "stream_options": "needs stream",
    "prompt_logprobs": "needs an answer that is not streamed, and few enough scores",
    "top_logprobs": "needs logprobs",
    "continue_final_message": "needs a last message of the assistant",
    "add_generation_prompt": "the opposite of continue_final_message",
    "logit_bias": "ids have to be of the vocabulary",
    "allowed_token_ids": "likewise",
    "stop_token_ids": "likewise",
    "tokens": "likewise",
    "n": "prompts times n are bounded",
}
"""Fields whose values can be refused though their form is right, and why the description cannot say so."""


def refused_only_for_their_meaning(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """What the description allows is refused only for one of the reasons in `MEANING`."""
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive or response.status_code != 400:
        return
    told = response.json()["error"]
    field = (told["param"] or "").partition("[")[0].partition(".")[0]
    assert field in MEANING, told


@schema.auth()
class _Key:
    """Every request carries the key, but those that see whether it is needed."""

    def get(self, case: schemathesis.Case, context: Any) -> str:
        return KEY["authorization"]

    def set(self, case: schemathesis.Case, data: str, context: Any) -> None:
        case.headers["authorization"] = data


def examples(number: int) -> settings:
    return settings(
        max_examples=number, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )  # fmt: skip


@schema.exclude(path="/tokenize").parametrize()
@examples(30)
def test_the_api_is_as_it_describes_itself(case: schemathesis.Case) -> None:
    check(case)


@schema.include(path="/tokenize").parametrize()
@examples(8)  # of bodies that are those of two others
def test_tokenizing_is_as_it_is_described(case: schemathesis.Case) -> None:
    check(case)


def check(case: schemathesis.Case) -> None:
    """All checks of schemathesis, and ours."""
    excluded: list[Any] = [positive_data_acceptance]  # the check of ours is stricter
    if "x-schemathesis-unknown-property" in case.headers:
        excluded.append(negative_data_rejection)  # headers that a server does not know are none of its business
    case.call_and_validate(additional_checks=[refused_only_for_their_meaning], excluded_checks=excluded)
