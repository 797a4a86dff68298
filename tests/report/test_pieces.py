from __future__ import annotations

from rackserve.report.pieces import data_table, figure, legend, table_frame


def test_what_comes_from_outside_is_escaped() -> None:
    made = legend(["<a>"], "s") + figure("<a>", "", "<a>") + data_table("<a>", ["<a>"], [["<a>"]], 0) + table_frame('"<a>', "")
    assert "<a>" not in made and made.count("&lt;a&gt;") == 7


def test_colours_repeat_after_six() -> None:
    assert legend([str(n) for n in range(8)], "p").count('class="p1"') == 2


def test_the_first_columns_are_words() -> None:
    made = data_table("t", ["a", "b"], [["x", "1"]], texts=1)
    assert '<th class="words">a</th><th>b</th>' in made and '<td class="words">x</td><td>1</td>' in made
    assert 'data-name="t"' in made


def test_a_figure_may_have_a_look() -> None:
    assert figure("t", "d", look="main").startswith('<figure class="main">')
