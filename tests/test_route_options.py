"""Options of the router's command."""

from __future__ import annotations

from rackserve.cli import parser


def test_workers_may_be_named_several_times() -> None:
    options = parser().parse_args(["route", "--worker", "http://a:1", "--worker", "http://b:2,dp_ranks=2", "--port", "0"])
    assert options.workers == ["http://a:1", "http://b:2,dp_ranks=2"]
    assert (options.port, options.host, options.tokenizer) == (0, None, None)
