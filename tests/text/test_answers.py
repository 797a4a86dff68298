from __future__ import annotations

from rackserve.text.answers import ContentDelta, PlainParser


def test_plain_text_is_content_and_nothing_is_held_back() -> None:
    parser = PlainParser()
    assert parser.feed("<think>a") == [ContentDelta("<think>a")] and parser.feed("") == []
    rest = parser.finish()
    assert rest.deltas == [] and not rest.cut and not rest.malformed and rest.num_calls == 0
