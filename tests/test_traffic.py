from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve import traffic as traffic_module
from rackserve.base.errors import FileFormatError
from rackserve.base.keys import CacheNamespace, extend_chain, key_at
from rackserve.base.messages import Cancel, Message, Output, Submit
from rackserve.base.request import Request, Usage
from rackserve.base.topology import Topology
from rackserve.bench.session import requests_of
from rackserve.bench.trace import read_sessions
from rackserve.cli import main
from rackserve.config import ServerConfig, Settings
from rackserve.live.runner import RunnerSpec, layout_of
from rackserve.serving import open_server
from rackserve.traffic import TrafficLog, read_traffic
from tests.e2e.rig import VOCABULARY, hex_tokenizer

BLOCK = 4
ROOT = CacheNamespace("m", "0", BLOCK, "x").root()


def request(name: str, session: str, tokens: list[int]) -> Request:
    raw = array("i", tokens).tobytes()
    return Request(name, session, raw, extend_chain(b"", ROOT, raw, BLOCK), len(tokens), 9, root=ROOT)


def done(name: str, num_tokens: int, made: int, error: str | None = None) -> Output:
    usage = Usage(num_tokens, 0, made)
    return Output(name, made, (), None if error else "stop", error, usage=usage)


@dataclass
class Watch:
    """A clock that a test moves."""

    now: int = 1_000_000_000

    def __call__(self) -> int:
        return self.now


@dataclass
class Keeper:
    """A node and a transport that keep what they are given."""

    kept: list[Message] = field(default_factory=list)

    def handle(self, message: Message) -> None:
        self.kept.append(message)

    def send(self, to: str, message: Message) -> None:
        self.kept.append(message)


def play(path: Path, calls: list[tuple[str, list[int]]], salt: bytes = b"s") -> list[Request]:
    """Record one request a second, each answered with 3 tokens after half a second."""
    watch = Watch()
    log = TrafficLog(path, BLOCK, salt=salt, now=watch)
    made = []
    for number, (session, tokens) in enumerate(calls):
        made.append(request(f"r{number}", session, tokens))
        log.began(made[-1])
        watch.now += 500_000_000
        log.ended(done(f"r{number}", len(tokens), 3))
        watch.now += 500_000_000
    log.close()
    return made


def test_a_recording_becomes_sessions_with_lengths_times_and_shared_blocks(tmp_path: Path) -> None:
    head = list(range(10))
    play(tmp_path / "log", [("a", head), ("b", [*range(8), 99, 98, 97, 96]), ("a", [*range(14)])])
    sessions, num_failed = read_traffic(tmp_path / "log")
    assert num_failed == 0 and [session.id for session in sessions] == ["s000000", "s000001"]
    assert all(session.shared and session.block_tokens == BLOCK for session in sessions)
    assert [session.start_ns for session in sessions] == [0, 1_000_000_000], "sessions keep their distance"
    first, second = (list(requests_of(session.entries)) for session in sessions)
    assert [(r.at_ns, r.api_ns, r.input_tokens, r.output_tokens) for r in first] == [
        (0, 500_000_000, 10, 3),
        (2_000_000_000, 500_000_000, 14, 3),
    ]
    ids = [list(memoryview(r.hash_ids).cast("i")) for r in (*first, *second)]
    assert ids == [[0, 1], [0, 1, 3], [0, 1, 2]], "numbers in order of appearance, the common head shared"


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), min_size=1, max_size=14)), min_size=1, max_size=10)
)
def test_two_prompts_share_exactly_the_blocks_they_shared_when_served(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("t") / "log"
    made = play(path, calls)
    sessions, _ = read_traffic(path)
    names = list(dict.fromkeys(session for session, _ in calls))
    order = [r for name in names for r in made if r.session == name]
    replayed = [r for session in sessions for r in requests_of(session.entries)]
    assert [r.input_tokens for r in replayed] == [r.num_tokens for r in order]
    for mine, theirs in zip(order, replayed, strict=True):
        for other, others in zip(order, replayed, strict=True):
            naive = 0
            while naive < min(len(mine.chain), len(other.chain)) // 16 and key_at(mine.chain, naive) == key_at(
                other.chain, naive
            ):
                naive += 1
            a, b = memoryview(theirs.hash_ids).cast("i"), memoryview(others.hash_ids).cast("i")
            assert next((n for n in range(min(len(a), len(b))) if a[n] != b[n]), min(len(a), len(b))) == naive


def test_nothing_can_be_looked_up_in_a_recording(tmp_path: Path) -> None:
    """Neither token ids nor block keys nor session names are in it, and another run's salt gives other digests."""
    calls = [("secret-session", list(range(70_000, 70_012)))]
    [made] = play(tmp_path / "one", calls, salt=b"1")
    play(tmp_path / "two", calls, salt=b"2")
    play(tmp_path / "again", calls, salt=b"1")
    one, two = (tmp_path / "one").read_bytes(), (tmp_path / "two").read_bytes()
    for raw in (one, two):
        assert b"secret" not in raw and b"70000" not in raw and made.tokens not in raw
        assert not any(key_at(made.chain, n).hex()[:12].encode() in raw for n in range(3))
    line, other = (msgspec.json.decode(raw.splitlines()[1]) for raw in (one, two))
    assert line["new"] != other["new"] and line["session"] != other["session"]
    assert one == (tmp_path / "again").read_bytes(), "all else is the traffic's"


def test_without_a_salt_each_recording_draws_its_own(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        log = TrafficLog(tmp_path / name, BLOCK, now=Watch())
        log.began(request("r", "a", [1, 2, 3, 4]))
        log.ended(done("r", 4, 1))
        log.close()
        digests.add(msgspec.json.decode((tmp_path / name).read_bytes().splitlines()[1])["new"])
    assert len(digests) == 2


def test_a_turn_writes_only_its_new_blocks_even_if_its_session_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [("a", list(range(40))), ("b", list(range(40))), ("a", list(range(44)))]
    play(tmp_path / "kept", calls)
    monkeypatch.setattr(traffic_module, "MAX_CHAIN_BYTES", 10 * 16)
    play(tmp_path / "forgotten", calls)
    keeps = [
        [msgspec.json.decode(line)["keep"] for line in (tmp_path / name).read_bytes().splitlines()[1:]]
        for name in ("kept", "forgotten")
    ]
    assert keeps == [[0, 0, 10], [0, 0, 0]]
    assert read_traffic(tmp_path / "kept") == read_traffic(tmp_path / "forgotten")


def test_the_taps_pass_everything_on_and_see_where_requests_begin_and_end(tmp_path: Path) -> None:
    log, node, transport = TrafficLog(tmp_path / "log", BLOCK, salt=b"s", now=Watch()), Keeper(), Keeper()
    submit = Submit(request("r", "a", [1, 2, 3, 4, 5]), "api")
    tapped_transport, tapped_node = log.around_transport(transport), log.around_node(node)
    for message in (submit, Cancel("other", "x")):
        tapped_transport.send("frontend", message)
    outputs = [Output("r", 0, (7,)), done("r", 5, 2), done("unknown", 5, 2)]
    for output in outputs:
        tapped_node.handle(output)
    assert transport.kept == [submit, Cancel("other", "x")] and node.kept == outputs
    log.close()
    [session], _ = read_traffic(tmp_path / "log")
    assert [r.output_tokens for r in requests_of(session.entries)] == [2]


def test_failed_requests_are_counted_and_left_out_but_the_next_turn_still_builds_on_them(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path / "log", BLOCK, salt=b"s", now=Watch())
    for number, error in enumerate((None, "overloaded", None)):
        log.began(request(f"r{number}", "a", list(range(4 * number + 4))))
        log.ended(done(f"r{number}", 4 * number + 4, 1, error))
    log.close()
    [session], num_failed = read_traffic(tmp_path / "log")
    assert num_failed == 1
    assert [r.num_blocks for r in requests_of(session.entries)] == [1, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_the_recording_and_not_the_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, node = TrafficLog(tmp_path / "log", BLOCK, salt=b"s", now=Watch()), Keeper()
    log._file = Path("/dev/full").open("wb")  # noqa: SIM115 (the log closes it)
    for number in range(3):
        log.began(request(f"r{number}", "a", [1, 2, 3, 4]))
        log.around_node(node).handle(done(f"r{number}", 4, 1))
    log.close()
    assert len(node.kept) == 3
    said = [record.message for record in caplog.records]
    assert len(said) <= 2 and "No space left on device; no more traffic is recorded there" in said[0]


def test_a_file_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"cannot be written .*--record"):
        TrafficLog(tmp_path / "no" / "such", BLOCK)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"", "is empty"),
        (b'{"t": 1}\n', ":1: "),
        (b'{"rackserve_traffic":1,"block_tokens":4}\n{"session":"a"}\n', ":2: "),
        (
            b'{"rackserve_traffic":1,"block_tokens":4}\n'
            b'{"session":"a","at":0,"took":1,"input":4,"output":1,"keep":3,"new":""}\n',
            ":2: `keep`, `new`, `input` or `at` cannot be",
        ),
        (
            b'{"rackserve_traffic":1,"block_tokens":4}\n'
            b'{"session":"a","at":0,"took":1,"input":4,"output":1,"keep":0,"new":"xy"}\n',
            ":2: `new` is not hexadecimal",
        ),
    ],
)
def test_a_damaged_recording_is_named_by_file_and_line(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        read_traffic(path)
    assert str(caught.value).startswith(str(path)) and says in str(caught.value)


def test_a_recording_cut_off_in_the_middle_of_a_line_keeps_the_lines_before(tmp_path: Path) -> None:
    play(tmp_path / "log", [("a", [1, 2, 3, 4]), ("a", list(range(8)))])
    raw = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(raw[:-7])
    [session], _ = read_traffic(tmp_path / "log")
    assert session.num_requests == 1


def test_the_command_writes_a_trace_that_is_read_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(tmp_path / "log", [("a", list(range(10))), ("b", list(range(12))), ("a", list(range(15)))])
    assert main(["record", str(tmp_path / "log"), "--out", str(tmp_path / "trace.jsonl.gz")]) == 0
    assert "2 sessions, 3 requests; 0 failed requests left out" in capsys.readouterr().out
    assert list(read_sessions(tmp_path / "trace.jsonl.gz")) == read_traffic(tmp_path / "log")[0]
    (tmp_path / "log").write_bytes((tmp_path / "log").read_bytes().splitlines(keepends=True)[0])
    assert main(["record", str(tmp_path / "log"), "--out", str(tmp_path / "x")]) == 3
    assert "holds no request that ended well" in capsys.readouterr().err


def test_the_traffic_of_a_live_rack_is_recorded_and_reads_back(tmp_path: Path) -> None:
    spec = RunnerSpec(vocab_size=VOCABULARY)
    topology = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=64, decode_blocks=48, segment_blocks=16)
    server = ServerConfig(port=0, tokenizer=str(hex_tokenizer(tmp_path)))
    given = Settings(topology=topology, runner=spec, server=server)
    log = TrafficLog(tmp_path / "log", layout_of(spec).block_tokens)

    async def run() -> None:
        async with open_server(given, tap=log) as served, httpx.AsyncClient(trust_env=False, timeout=20) as client:
            for ids in ([7, 8, 9] * 20, [7, 8, 9] * 30):
                body = {"prompt": ids, "max_tokens": 5, "temperature": 0, "session_id": "mine", "ignore_eos": True}
                assert (await client.post(f"{served.url}/v1/completions", json=body)).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 30))
    log.close()
    [session], num_failed = read_traffic(tmp_path / "log")
    first, second = requests_of(session.entries)
    assert num_failed == 0 and session.block_tokens == 16
    assert [(r.input_tokens, r.output_tokens, r.num_blocks) for r in (first, second)] == [(60, 5, 3), (90, 5, 5)]
    assert second.hash_ids.startswith(first.hash_ids) and second.at_ns >= first.end_ns > 0
