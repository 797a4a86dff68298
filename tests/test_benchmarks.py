"""Every benchmark works: a quick run gives finite figures, and at least one of them beside something named."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SHARED = {
    "measure",
    "questions",
    "real_step",
    "run",
    "stub_workers",
    "frontend_floor",
    "frontend_ours",
    "frontend_vllm",
    "v41_model",
    "v41_start",
}
PEERS = {"agentx_agreement", "peer_replay", "cpu_engine", "served"}
"""Without the other people's software they compare with they only say what they need."""

SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in SHARED)
HAS_ENGINE = all(find_spec(name) for name in ("torch", "gguf", "safetensors"))


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in PEERS])
def test_a_quick_run_gives_finite_figures_and_ratios(script: str) -> None:
    if script in ("engine", "quality"):
        from rackserve.model.embedded import SMOLLM2, cache_root

        if not HAS_ENGINE or not (cache_root() / SMOLLM2.folder_name).is_dir():
            pytest.skip("the engine extra or the embedded model is not on this machine")
    if script == "quality":
        from rackserve.kernels.cpu import library

        if library.find() is None:
            pytest.skip("no native kernels were built here")
    done = python(f"benchmarks/{script}.py", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout)
    assert result["name"] == script and not result["skipped"]
    assert result["figures"] and result["claims"]
    for figure in result["figures"]:
        values = [*figure["values"], *figure["ratios"]]
        assert figure["values"] and all(math.isfinite(value) for value in values), figure
        assert bool(figure["ratios"]) == bool(figure["to"]), figure
    assert any(figure["ratios"] for figure in result["figures"])


@pytest.mark.parametrize("script", sorted(PEERS))
def test_a_comparison_without_its_peer_says_what_it_needs(script: str) -> None:
    done = python(f"benchmarks/{script}.py", "--json")
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout)
    assert result["name"] == script and result["skipped"].startswith("not run, it needs ") and not result["figures"]


def test_results_name_machine_commit_seed_and_every_claim(tmp_path: Path) -> None:
    out = tmp_path / "RESULTS.md"
    done = python("benchmarks/run.py", "--quick", "--only", "hashing", "--seed", "7", "--out", str(out))
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    for word in ("cores", "Python", "load:", "commit:", "seed: 7", "## hashing", "| ratio |"):
        assert word in text
    assert text.count("\n- quick run, not judged: ") == 6


def test_a_part_of_the_benchmarks_replaces_its_own_sections_only(tmp_path: Path) -> None:
    out = tmp_path / "RESULTS.md"
    kept = "## agentx_agreement\n\nwhat an earlier run found\n"
    out.write_text(f"# Results\n\nthe head\n\n## hashing\n\nstale words\n\n{kept}")
    done = python("benchmarks/run.py", "--quick", "--only", "hashing", "agentx_agreement", "--out", str(out))
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert text.startswith("# Results\n\nthe head\n\n## hashing\n") and "stale" not in text
    assert text.endswith(kept) and "Measured by itself: commit " in text


def test_a_failing_script_is_named_and_fails_the_run(tmp_path: Path) -> None:
    out = tmp_path / "RESULTS.md"
    words = ("--quick", "--only", "simulator", "--trace", str(tmp_path / "missing.jsonl"), "--out", str(out))
    done = python("benchmarks/run.py", *words)
    assert done.returncode == 1
    assert "the script failed" in out.read_text()


def test_run_knows_every_script() -> None:
    listed = python("-c", "import sys; sys.path.insert(0, 'benchmarks'); import run; print(*run.SCRIPTS)")
    assert sorted(listed.stdout.split()) == SCRIPTS


def test_readme_has_a_line_for_every_script() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    assert all(f"`{script}.py`" in text for script in SCRIPTS)


def test_a_script_that_is_interrupted_may_end_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('ended', file=sys.stderr, flush=True), sys.exit(1)))\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "signal.pause()\n"
    )
    code = f"import run, pathlib; run.HERE = pathlib.Path({str(tmp_path)!r}); run.run_script('slow', [])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=BENCHMARKS, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None and running.stderr.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        assert running.stderr.readline() == "ended\n"
        running.stderr.read()
    assert running.returncode != 0
