from __future__ import annotations

from rackserve.cli import parser


def test_bench_and_simulate_share_the_options_of_a_trace() -> None:
    given = ["--trace", "t", "--limit", "3", "--max-turns", "2", "--max-context", "9", "--serial", "--out", "o"]
    both = [parser().parse_args(["bench", "--url", "x", *given]), parser().parse_args(["simulate", *given])]
    for options in both:
        assert (options.trace, options.limit, options.max_turns, options.max_context) == ("t", 3, 2, 9)
        assert options.serial and options.out == "o"


def test_scales_of_a_benchmark_are_left_open_because_they_depend_on_its_rules() -> None:
    bench, simulate = (parser().parse_args([*words]) for words in (["bench", "--url", "x"], ["simulate"]))
    assert (bench.scale, bench.time_scale, bench.deadline, bench.warmup_requests) == (None, None, None, None)
    assert (simulate.scale, simulate.time_scale) == (32, 100.0)
    assert (bench.concurrency, simulate.concurrency) == ((4,), 4)


def test_headers_and_concurrencies_may_be_several() -> None:
    words = ["bench", "--url", "x", "--header", "a=1", "--header", "b=2", "--concurrency", "1,2,4"]
    options = parser().parse_args(words)
    assert (options.header, options.concurrency) == ([("a", "1"), ("b", "2")], (1, 2, 4))
