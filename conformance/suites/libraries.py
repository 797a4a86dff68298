"""Python libraries for agents, each driven by a script of its own in its own environment."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from conformance.cases import Case, Pins, Site, Suite, driven

DRIVERS = Path(__file__).parent.parent / "drivers"


def run(driver: str, site: Site) -> list[Case]:
    """Both models: what is said is the embedded one's, what is called the scripted one's."""
    embedded, scripted = site.rack("embedded"), site.rack("scripted")
    words = [embedded.url, embedded.model, scripted.url, scripted.model]
    return driven(site.run([site.programs / "python", DRIVERS / driver, *words]))


SUITES = (
    Suite("langchain", "langchain-openai", partial(run, "use_langchain.py"), Pins("pip", ("langchain-openai==1.7.4",)), 240.0),
    Suite(
        "pydantic-ai",
        "pydantic-ai",
        partial(run, "use_pydantic_ai.py"),
        Pins("pip", ("pydantic-ai-slim[openai]==2.68.0",)),
        240.0,
    ),
)
