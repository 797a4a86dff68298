"""Shares of a group cover everything once."""

from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.model.parallel import Share


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_every_expert_and_every_slice_has_one_owner(tp: int, ep: int) -> None:
    shares = [Share(t, tp, e, ep) for e in range(ep) for t in range(tp)]
    assert [share.device for share in shares] == list(range(tp * ep))
    assert sorted(e for share in shares if share.tp_rank == 0 for e in share.experts(8)) == list(range(8))
    owned = [share.tp_slice(64, "width", 32) for share in shares if share.ep_rank == 0]
    assert [n for part in owned for n in range(64)[part]] == list(range(64))


def test_what_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ConfigError, match="groups of 3"):
        Share(0, 2).tp_slice(3, "groups")
    with pytest.raises(ConfigError, match="7 experts"):
        Share(0, 1, 0, 2).experts(7)
