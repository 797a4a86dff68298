from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from rackserve.base.units import to_ns
from rackserve.bench.session import Subagent, TraceRequest, requests_of
from rackserve.bench.weka import parse_weka
from tests.bench.toys import ids


def entry(t: float, hash_ids: list[int], **changes: Any) -> dict[str, Any]:
    made = {"t": t, "type": "n", "model": "m", "in": 64 * len(hash_ids), "out": 7, "hash_ids": hash_ids, "api_time": 2.0}
    return made | changes


def document(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": "a", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | changes


def parse(document: Any) -> Any:
    return parse_weka((document if isinstance(document, str) else json.dumps(document)).encode())


def test_native_and_compact_form_give_the_same_session() -> None:
    inner = [entry(0, [9, 10]), entry(3, [9, 11])]
    sub = {"t": 5, "type": "subagent", "agent_id": "x", "duration_ms": 6000, "requests": inner}
    native = document(entry(0, [1, 2]), sub, entry(20, [1, 2, 3, 7]))

    def compact(t: float, lcp: int, tail: list[list[int]], nblk: int) -> dict[str, Any]:
        made = entry(t, [0] * nblk, lcp=lcp, tail=tail, nblk=nblk)
        del made["hash_ids"]
        return made

    packed = document(
        compact(0, 0, [[1, 2]], 2),
        sub | {"requests": [compact(0, 0, [[9, 2]], 2), compact(3, 1, [[11, 1]], 2)]},
        compact(20, 0, [[1, 3], [7, 1]], 4),
    )
    first, second = parse(native), parse(packed)
    assert first == second
    assert first.entries[1] == Subagent(
        "x",
        to_ns(5),
        to_ns(11),
        (TraceRequest(0, to_ns(2), 128, 7, ids(9, 10), "m"), TraceRequest(to_ns(3), to_ns(2), 128, 7, ids(9, 11), "m")),
    )
    assert [r.hash_ids for r in requests_of(first.entries)] == [ids(1, 2), ids(9, 10), ids(9, 11), ids(1, 2, 3, 7)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"id": "a", "requests": [', "truncated"),
        (document(entry(0, [1], **{"in": "many"})), "$.requests[0].in"),
        (document(entry(0, [1]), entry(1, [2, 1])), "hash id 1 follows two different blocks"),
        (document(entry(0, [1, 2], **{"in": 64 * 4})), "do not match a prompt of 256"),
        (document(entry(0, [1, 2, 3], **{"in": 64})), "do not match a prompt of 64"),
        (document(entry(0, [1], out=-1)), "`out` at least 0"),
        (document(entry(-1.0, [1])), "`t` is negative"),
        (document(entry(1e300, [1])), "`t` must be a number of at most 1e+09 seconds"),
        (document(entry(0, [1], api_time=1.1e9)), "`api_time` must be a number of at most"),
        (document(entry(0, [1], think_time=-1e300)), "`think_time` must be a number of at most"),
        (document({"t": 0, "type": "subagent", "duration_ms": 1e300, "requests": []}), "`duration_ms` must be a number"),
        ('{"id": "a", "requests": [{"t": 1e999}]}', "$.requests[0].t"),
        ('{"id": "a", "requests": ' + '[{"requests": ' * 5000, "recursion"),
        (document(entry(0, [1], out=10**30)), "both at most 1000000000"),
        (document({"t": 0, "type": "n", "in": 64, "out": 1, "lcp": 0, "tail": [[1, 10**12]]}), "a run of 1000000000000 ids"),
        (document(entry(0, [1 << 40])), "does not fit 31 bits"),
        (document({"t": 0, "type": "n", "in": 64, "out": 1, "lcp": 0, "tail": [[1 << 40, 1]]}), "does not fit 31 bits"),
        (document({"t": 0, "type": "n", "in": 64, "out": 1}), "needs `hash_ids`"),
        (document({"t": 0, "type": "n", "in": 64, "out": 1, "lcp": 3, "tail": []}), "longer than the 0 ids"),
        (document({"t": 0, "type": "n", "in": 64, "out": 1, "lcp": 0, "tail": [[1, 1]], "nblk": 9}), "`nblk` = 9"),
        (document({"t": 0, "type": "subagent"}), "needs `requests`"),
        (document(entry(0, [1]), hash_id_scope="global"), "hash_id_scope"),
        (document(entry(0, [1]), block_size=0), "block_size"),
    ],
)
def test_a_bad_document_says_what_is_wrong(bad: Any, says: str) -> None:
    with pytest.raises((ValueError, RecursionError, msgspec.MsgspecError)) as caught:
        parse(bad)
    assert says in str(caught.value)


def test_the_id_of_a_part_block_is_left_out() -> None:
    session = parse(document(entry(0, [1, 2], **{"in": 100}), entry(1, [1], **{"in": 100})))
    assert [(r.hash_ids, r.input_tokens) for r in requests_of(session.entries)] == [(ids(1), 100), (ids(1), 100)]


def test_an_unrecorded_answer_time_is_what_think_time_leaves() -> None:
    first, last = entry(0, [1]), entry(10, [1], think_time=4.0)
    del first["api_time"], last["api_time"]
    session = parse(document(first, last))
    assert [r.api_ns for r in requests_of(session.entries)] == [to_ns(6), 0]
