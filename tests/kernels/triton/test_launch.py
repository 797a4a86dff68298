from __future__ import annotations

import pytest
import torch

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import check, check_strided, power_of_two


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "float64"),
        (torch.zeros(2, 4), r"\(2, 4\); its shape must be \(\*, 3\)"),
        (torch.zeros(3), r"\(3,\); its shape must be \(\*, 3\)"),
        (torch.zeros(3, 2).t(), "dense"),
        (torch.zeros(2, 4)[:, :3], "contiguous"),
    ],
)
def test_an_error_names_the_argument_and_what_is_wrong_with_it(tensor: torch.Tensor, named: str) -> None:
    with pytest.raises(InvariantError, match=f"keys .*{named}"):
        check("keys", tensor, torch.float32, (None, 3))


def test_blocks_may_lie_apart_where_that_is_allowed() -> None:
    check_strided("cache", torch.zeros(2, 4)[:, :3], torch.float32, (2, 3))


def test_a_block_holds_its_rows_and_no_smaller_one_does() -> None:
    assert [power_of_two(size) for size in (1, 2, 3, 5, 512, 513)] == [1, 2, 4, 8, 512, 1024]
