"""Datasette's `llm`: through `rackserve launch`, and with settings of its own for tools and schemas."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from conformance.cases import Case, Pins, Rack, Site, Suite, case
from conformance.scripted_model import HEARD

QUESTION = "What is the capital of France?"
TOOL = 'def weather(city: str) -> str:\n    "The weather of a city."\n    return "cold in " + city\n'


def run(site: Site) -> list[Case]:
    """Chat, streamed and not, a second turn, a tool and a schema."""
    embedded, scripted = site.rack("embedded"), site.rack("scripted")
    home = str(site.scratch)
    launch = [sys.executable, "-m", "rackserve", "launch", "llm", "--url", embedded.url, "--"]
    plain = site.run([*launch, "--no-stream", "-o", "temperature", "0", "-o", "max_tokens", "30", QUESTION], HOME=home)
    streamed = site.run([*launch, "-o", "temperature", "0", "-o", "max_tokens", "30", QUESTION], HOME=home)
    cases = [
        case("launched: it answers", plain.returncode == 0 and "Paris" in plain.stdout, plain.stderr or plain.stdout),
        case("launched: it streams what it answers", streamed.stdout == plain.stdout, streamed.stdout + streamed.stderr),
    ]
    user = _user_path(site.scratch / "user", embedded, scripted)
    llm = site.programs / "llm"
    called = site.run([llm, "-m", scripted.model, "--functions", TOOL, "--td", "How is Oslo?"], LLM_USER_PATH=user)
    cases += [
        case("a tool is called", "cold in Oslo" in called.stderr + called.stdout, called.stderr),
        case("its result is heard", called.stdout.strip().endswith(HEARD), called.stdout),
    ]
    asked = ["--schema", "name, population int", "-o", "temperature", "0", "Name a city."]
    formed = site.run([llm, "-m", embedded.model, *asked], LLM_USER_PATH=user)
    try:
        keys = list(json.loads(formed.stdout))
    except ValueError:
        keys = []
    cases.append(case("an answer keeps to its schema", keys == ["name", "population"], formed.stdout + formed.stderr))
    site.run([llm, "-m", embedded.model, "-o", "max_tokens", "8", "Say hello."], LLM_USER_PATH=user)
    again = site.run([llm, "-c", "-o", "max_tokens", "8", "And again."], LLM_USER_PATH=user)
    logged = json.loads(site.run([llm, "logs", "-n", "1", "--json"], LLM_USER_PATH=user).stdout)[0]
    details = json.loads(logged["token_details"] or "{}")
    cached = details.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    cases.append(case("a conversation goes on from the cache", again.returncode == 0 and cached > 0, [logged, again.stderr]))
    return cases


def _user_path(folder: Path, *racks: Rack) -> str:
    """A folder of settings in which both models can do all they can."""
    folder.mkdir()
    models = [
        {"model_id": rack.model, "model_name": rack.model, "api_base": f"{rack.url}/v1",
         "supports_tools": True, "supports_schema": True} for rack in racks
    ]  # fmt: skip
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))
    return str(folder)


SUITES = (Suite("llm", "Datasette's llm", run, Pins("pip", ("llm==0.36",), "llm"), 240.0),)
