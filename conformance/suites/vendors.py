"""The vendors' own clients: in Python, by the default tests, and for Node."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

from conformance.cases import Case, Pins, Site, Suite, SuiteError, case, driven
from conformance.homes import ROOT

DRIVER = Path(__file__).parent.parent / "drivers" / "node_clients.mjs"


def run_default_tests(site: Site) -> list[Case]:
    """What `make test` runs of tests/conformance; llm-comply has a suite of its own."""
    report = site.scratch / "report.xml"
    folder = ROOT / "tests" / "conformance"
    words = ["--rootdir", str(ROOT), str(folder), "--ignore", str(folder / "test_llm_comply.py")]
    done = site.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *words])
    if not report.exists():
        raise SuiteError(f"pytest wrote no report: {(done.stderr or done.stdout)[-300:]}")
    cases = []
    for test in ElementTree.parse(report).iter("testcase"):
        skipped = test.find("skipped")
        wrong = [each for each in test if each.tag in ("failure", "error")]
        if skipped is not None:
            cases.append(Case(test.attrib["name"], "skipped", skipped.attrib.get("message", "")))
        else:
            cases.append(case(test.attrib["name"], not wrong, wrong and wrong[0].attrib.get("message")))
    return cases


def run_node(site: Site) -> list[Case]:
    """`openai` and `@anthropic-ai/sdk` against the embedded model, and calls against the scripted one."""
    embedded, scripted = site.rack("embedded"), site.rack("scripted")
    driver = shutil.copy(DRIVER, site.home)  # modules are looked for beside it
    return driven(site.run(["node", driver, embedded.url, embedded.model, scripted.url, scripted.model]))


NODE = Pins("npm", ("openai@7.59.0", "@anthropic-ai/sdk@1.14.0"), "openai")

SUITES = (
    Suite(
        "default-tests",
        "openai and anthropic in Python, and what else tests/conformance has",
        run_default_tests,
        deadline_s=600.0,
    ),
    Suite("node-clients", "openai and @anthropic-ai/sdk for Node", run_node, NODE, 240.0),
)
