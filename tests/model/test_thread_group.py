from __future__ import annotations

import pytest
import torch

from rackserve.base.errors import InvariantError, ResourceError
from rackserve.base.step import ItemResult, Step, StepResult
from rackserve.digest_model import digest_layout
from rackserve.model.parallel import Collectives
from rackserve.model.thread_group import ThreadGroup


class Adder:
    """Sums, joins and tells in every step; its result is what it heard, as tokens."""

    layout = digest_layout(4)

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.heard: list[tuple[object, ...]] = []

    def run(self, step: Step) -> StepResult:
        number = self._collectives.share.tp_rank
        part = torch.tensor([1e8, 1.0, -1e8][number] if step.retired == (3,) else float(number + step.dp_rank))
        total = self._collectives.tp_sum(part)
        joined = self._collectives.tp_concat(torch.tensor([[number, number]]))
        told = self._collectives.agree([float(number)])
        flag = self._collectives.any(number == step.dp_rank)
        self.heard.append((total.item(), joined.tolist(), told, flag))
        return StepResult(step.dp_rank, (ItemResult(0, (int(total),)),))


def test_every_device_hears_the_same_and_sums_are_taken_in_order() -> None:
    group = ThreadGroup(3, Adder)
    for number in range(20):
        assert group.run(Step(number, ())).items[0].tokens == (3 + 3 * number,)
    group.run(Step(0, (), retired=(3,)))
    group.close()
    heard = group.devices[0].heard
    assert [device.heard for device in group.devices] == [heard] * 3
    assert heard[0] == (3.0, [[0, 0, 1, 1, 2, 2]], [0.0], True) and heard[5][3] is False
    assert heard[-1][0] == 0.0  # in another order it would be 1


class Failing(Adder):
    def run(self, step: Step) -> StepResult:
        if self._collectives.share.tp_rank == 1:
            raise InvariantError("device 1 has had enough")
        return super().run(step)


def test_what_one_device_raises_is_raised_and_leaves_nobody_waiting() -> None:
    group = ThreadGroup(3, Failing)
    with pytest.raises(InvariantError, match="device 1 has had enough"):
        group.run(Step(0, ()))
    with pytest.raises((InvariantError, ResourceError)):
        group.run(Step(1, ()))
    group.close()


def test_a_group_of_one_is_its_device() -> None:
    group = ThreadGroup(1, Adder)
    assert group.run(Step(4, ())).items[0].tokens == (4,)
    group.close()
