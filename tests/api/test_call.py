from __future__ import annotations

from rackserve.api.call import Caller


def test_an_unnamed_caller_is_the_only_tenant() -> None:
    assert Caller().tenant == ""
