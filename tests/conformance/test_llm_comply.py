"""llm-comply: named tests against the vendors' own specifications."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DIFFERENCES = {
    "open-responses": {"image-input": "the model reads text only: 400 names the part"},
    "openai-chat": {
        "chat-image-input": "the model reads text only: 400 names the part",
        "chat-error-handling": "`model` may be left out, as one model is served",
    },
    "anthropic": {"anth-image-input": "the model reads text only: 400 names the part"},
}
"""Tests that are meant to fail here, and why."""

UP_TO_THE_MODEL = {"tool-calling", "chat-tool-calling", "anth-tool-calling"}
"""Offer a tool and want a call; a model this small calls when it likes. The clients' tests make it call."""

ENDLESS = {
    "expected status='completed', got 'incomplete'",
    "finish_reason: expected 'stop', got 'length'",
    "stop_reason: expected 'end_turn', got 'max_tokens'",
}
"""All that is wrong with an answer that was drawn at random and met the end of the context: a model this small may not stop."""


@pytest.mark.model
@pytest.mark.parametrize("dialect", DIFFERENCES)
def test_only_what_is_named_differs_from_the_specification(dialect: str, url: str, model: str) -> None:
    suite = Path(sys.executable).with_name("llm-comply")
    if not suite.exists():
        pytest.skip("llm-comply is not installed")
    command = [str(suite), "--json", "--format", dialect, "-u", f"{url}/v1", "-k", "none", "-m", model, "--timeout", "90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = json.loads(done.stdout)
    results = told["results"]
    assert len(results) >= 9
    failed = {result["id"] for result in results if result["status"] == "failed" and not set(result["errors"]) <= ENDLESS}
    assert failed - UP_TO_THE_MODEL == set(DIFFERENCES[dialect]), [result for result in results if result["status"] == "failed"]
