from __future__ import annotations

from starlette.routing import Route

from rackserve.api.contract import CONTRACTS
from rackserve.api.errors import STATUSES
from rackserve.api.guard import OPEN
from tests.api.rig import Rig, run, text


def test_each_route_of_the_api_has_its_contract_and_each_contract_its_route() -> None:
    async def scene() -> set[str]:
        return {route.path for route in Rig(text("x")).app.routes if isinstance(route, Route)}

    assert run(scene()) == set(CONTRACTS)


def test_contracts_promise_no_status_without_a_meaning_and_only_open_paths_lack_401() -> None:
    for path, contract in CONTRACTS.items():
        assert set(contract.statuses) <= set(STATUSES)
        assert contract.open is (("GET", path) in OPEN) is (401 not in contract.statuses)
        assert (400 in contract.statuses) is bool(contract.bodies)
