"""Folders that hold the packages of suites: made once, at pinned versions, by the packagers' ordinary clients."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from conformance.cases import Pins, SuiteError

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "conformance"
INSTALL_S = 900.0
STAMP = ".complete"


def home_of(suite: str, pins: Pins) -> Path:
    """Where they are, or will be: other pins, another folder."""
    digest = hashlib.sha256(json.dumps([pins.packager, pins.packages, sys.version_info[:2]]).encode()).hexdigest()[:8]
    return BUILD / f"{suite}-{digest}"


def install(suite: str, pins: Pins) -> Path:
    """The folder with the packages. SuiteError if they cannot be had, with what the packager said last."""
    if pins.packager == "none":
        return Path(sys.prefix)
    home = home_of(suite, pins)
    if (home / STAMP).exists():
        return home
    if pins.packager == "npm" and shutil.which("npm") is None:
        raise SuiteError("npm is not here; apt-get install npm")
    shutil.rmtree(home, ignore_errors=True)  # one that was cut short
    home.mkdir(parents=True)
    if pins.packager == "pip":
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(home / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet", *pins.packages])
    else:
        (home / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
        _run(["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", "--save-exact", *pins.packages])
    (home / STAMP).touch()
    return home


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise SuiteError(f"not installed: {Path(command[0]).name} took more than {INSTALL_S:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise SuiteError(f"not installed: {Path(command[0]).name} says: {lines[-1][:300]}")
