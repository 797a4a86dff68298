from __future__ import annotations

from rackserve.api.answer import Ending
from rackserve.api.usage import CallUsage, usage_of


def test_a_prompt_counts_once_with_its_first_choices_cache_and_output_counts_for_all() -> None:
    endings = [
        Ending("stop", 10, 4, 3, 1, 2),
        Ending("length", 10, 8, 5, 2),
        Ending("stop", 20, 1, 1, 1, 1),
        Ending("stop", 20, 2, 1, 1),
    ]
    assert usage_of(endings, 2) == CallUsage(30, 5, 10, 3, 2)
