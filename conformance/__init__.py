"""Suites that nobody here wrote, run against `rackserve serve`: `make conformance`, or `python -m conformance [SUITE ...]`.

Owns what `make test` has no room for: agents, libraries and evaluation harnesses, each installed at a pinned version into
a folder of its own under build/conformance, which is fetched once. Nothing here is part of the package.
What cannot run is skipped with the reason, never counted as passed.
Law: a case that fails without being named in a suite's `differences`, or passes while named there, fails the run.
"""
