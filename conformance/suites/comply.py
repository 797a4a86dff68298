"""llm-comply: named tests against the vendors' own specifications. The same differences as in the default tests."""

from __future__ import annotations

import json

from conformance.cases import Case, Pins, Site, Suite, SuiteError, case
from tests.conformance.test_llm_comply import DIFFERENCES, ENDLESS, UP_TO_THE_MODEL

REASONS = {name: reason for named in DIFFERENCES.values() for name, reason in named.items()}


def run(site: Site) -> list[Case]:
    """All three dialects against the embedded model."""
    rack = site.rack("embedded")
    cases: list[Case] = []
    for dialect in DIFFERENCES:
        words = ["--json", "--format", dialect, "-u", f"{rack.url}/v1", "-k", "none", "-m", rack.model, "--timeout", "90"]
        done = site.run([site.programs / "llm-comply", *words])
        try:
            results = json.loads(done.stdout)["results"]
        except (ValueError, KeyError):
            raise SuiteError(f"llm-comply --format {dialect}: {(done.stderr or done.stdout)[-300:]}") from None
        for result in results:
            name, failed = result["id"], result["status"] == "failed"
            if failed and name in UP_TO_THE_MODEL:
                cases.append(
                    Case(name, "skipped", "a model this small calls a tool when it likes; the clients' suites make it")
                )
            elif failed and set(result["errors"]) <= ENDLESS:
                cases.append(Case(name, "skipped", "a model this small, drawing at random, may not know when to stop"))
            else:
                cases.append(case(name, not failed, result.get("errors")))
    return cases


SUITES = (
    Suite(
        "llm-comply", "the vendors' specifications", run, Pins("pip", ("llm-comply==0.5.0",), "llm-comply"), 400.0,
        differences=REASONS,
    ),
)  # fmt: skip
