"""Runs every benchmark and writes RESULTS.md beside this file: machine, commit, seed, figures with spread and ratio."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic

import msgspec
from measure import Result, as_markdown

HERE = Path(__file__).parent
SCRIPTS = (
    "control_plane",
    "index",
    "hashing",
    "text_prefix",
    "frontend",
    "simulator",
    "rack_simulation",
    "transfers",
    "engine",
    "quality",
    "v41_engine",
    "low_latency",
    "engram_rows",
    "resume_modes",
    "draft_budget",
    "pool_vs_affinity",
    "client",
    "routing",
    "agentx_agreement",
    "peer_replay",
    "cpu_engine",
    "served",
)
PEERS = ("agentx_agreement", "peer_replay", "cpu_engine", "served")
"""Scripts that compare with other people's software: without it they keep the section they left before."""

FILES = ("trace", "costs", "harness", "dynamo", "mooncake", "routers", "vllm", "llamacpp", "openvino", "gguf")
"""Options with something on this machine that scripts may use."""

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
PACKAGES = ("msgspec", "pyzmq", "torch")
FAILED = "the script failed"
ENDING_S = 60.0


def machine() -> list[str]:
    """What the figures were measured on, as lines of a list."""
    info = _fields(Path("/proc/cpuinfo"))
    flags = info.get("flags", "").split()
    memory = _fields(Path("/proc/meminfo")).get("MemTotal", "unknown")
    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    usable = len(os.sched_getaffinity(0))
    return [
        f"- machine: {usable} of {os.cpu_count()} cores, {info.get('model name', platform.machine())} "
        f"({', '.join(flag for flag in FLAGS if flag in flags) or 'no flags of interest'}), memory {memory}",
        f"- software: {platform.system()} {platform.release()}, Python {platform.python_version()}, {packages}",
    ]


def _fields(path: Path) -> dict[str, str]:
    """`name : value` lines of a file of the kernel; the last of a name wins."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit measured, and whether files under it were changed."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../rackserve", ".")
        return git("rev-parse", "--short=12", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_script(name: str, arguments: Sequence[str]) -> Result:
    """One script in a process of its own, on one thread of torch and its libraries."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as script:
        try:
            printed, _ = script.communicate()
        except BaseException:
            script.terminate()  # not killed: it has servers to end
            with suppress(subprocess.TimeoutExpired):
                script.wait(ENDING_S)
            script.kill()
            raise
    if script.returncode != 0:
        return Result(name, "", "", skipped=f"{FAILED} with exit status {script.returncode}")
    return msgspec.json.decode(printed.splitlines()[-1], type=Result)


def stamped(result: Result, seed: int) -> Result:
    """`result` with a note of its own on how it came about: its section may outlive the head of the page."""
    note = f"Measured by itself: commit {commit()}; seed {seed}; load {os.getloadavg()[0]:.2f}."
    return msgspec.structs.replace(result, notes=(*result.notes, note))


def sections(text: str) -> dict[str, str]:
    """The head of a page under the empty name, and its sections by script."""
    head, *parts = text.split("\n## ")
    return {"": head.rstrip() + "\n"} | {part.split("\n", 1)[0]: f"## {part.rstrip()}\n" for part in parts}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: only shows that the scripts work")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="SCRIPT")
    parser.add_argument(
        "--out", type=Path, help="file to write (default: RESULTS.md here; nothing after a quick run); --only keeps its others"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--trace", default="", help="a file of recorded sessions for the simulator to run as well")
    parser.add_argument("--costs", default="", help="costs.json of a calibrated run, for the simulated comparison")
    parser.add_argument("--harness", default="", help="the command of agentx-harness, in an environment of its own")
    parser.add_argument("--routers", default="", help="the Python of one with sglang-router and vllm-router, to compare with")
    parser.add_argument("--dynamo", default="", help="the Python of an environment with ai-dynamo, to compare with")
    parser.add_argument("--vllm", default="", help="the Python of an environment with vLLM, to compare with")
    parser.add_argument("--mooncake", default="", help="a Mooncake trace of requests, for that comparison")
    parser.add_argument("--llamacpp", default="", help="a build folder of llama.cpp, to compare with")
    parser.add_argument("--openvino", default="", help="the Python of an environment with openvino-genai, to compare with")
    parser.add_argument("--gguf", default="", help="the embedded model's file, and after commas others, for those comparisons")
    given = parser.parse_args(words)
    arguments = ["--seed", str(given.seed)] + ["--quick"] * given.quick
    files = {name: getattr(given, name) for name in FILES}
    arguments += [word for name, file in files.items() if file for word in (f"--{name}", file)]
    load, started = os.getloadavg()[0], monotonic()
    results: list[Result] = []
    out = given.out or (None if given.quick else HERE / "RESULTS.md")
    before = sections(out.read_text()) if out is not None and out.exists() else {}
    partial = set(given.only) != set(SCRIPTS)
    for name in given.only:
        begun = monotonic()
        results.append(run_script(name, arguments))
        if (partial or name in PEERS) and not results[-1].skipped:
            results[-1] = stamped(results[-1], given.seed)
        state = results[-1].skipped or f"{len(results[-1].figures)} figures"
        print(f"{name}: {state}, {monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    head = [
        "# Results of the benchmarks",
        "",
        "Generated by `python benchmarks/run.py`; not edited by hand. Every ratio is taken within a round, against something",
        "measured in the same round; small ratios are small costs unless the row says otherwise.",
        "",
        *machine(),
        f"- load: {load:.2f} before, {os.getloadavg()[0]:.2f} after (means of a minute); it took {monotonic() - started:.0f} s",
        f"- commit: {commit()}; seed: {given.seed}",
        "",
    ]
    page = {"": "\n".join(head)} | {result.name: as_markdown(result, given.quick) for result in results}
    idle = {result.name for result in results if result.skipped and not result.skipped.startswith(FAILED)}
    page |= {name: text for name, text in before.items() if (partial and name not in given.only) or name in idle}
    text = "\n".join(page[name].rstrip() + "\n" for name in ("", *SCRIPTS) if name in page)
    if out is None:
        print(text)
    else:
        out.write_text(text)
        print(f"wrote {out}", file=sys.stderr)
    return int(any(result.skipped.startswith(FAILED) for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
