from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from rackserve.base.errors import RequestError
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.text.numbers import NumberTokenizer
from rackserve.text.prompt_cache import MAX_FORKS, STRIDE_BYTES, Prompt, PromptCache, Scope
from rackserve.text.prompt_text import PromptText, Written
from rackserve.text.tokenizer import Piece, Tokenizer, Vocabulary
from tests.text.deepseek import deepseek_tokenizer
from tests.text.small_model import backend, small_tokenizer

ROOT = CacheNamespace("m", "0", 4, "l").root()
TURN = "<|im_start|>user\nthe cat sat<|im_end|>\n"


def scope(session: str = "s", root: bytes = ROOT) -> Scope:
    return Scope(root, 4, session)


def whole(vocabulary: Vocabulary, text: str, *, specials: bool = False) -> tuple[bytes, bytes]:
    tokens = vocabulary.encode(text, specials=specials)
    return tokens, extend_chain(b"", ROOT, tokens, 4)


def plain(prompt: Prompt) -> tuple[bytes, bytes]:
    return prompt.tokens, prompt.chain


@lru_cache
def odd_tokenizer(*extra: AddedToken, normalizing: bool = False) -> Tokenizer:
    """Added tokens that contain each other, overlap, and are matched before and after normalizing."""
    model = Backend.from_str(backend().to_str())
    first = [AddedToken(text, normalized=False) for text in ("<a>", "<a>b", "b<", "abc", "éé", "<b><b>")]
    second = [AddedToken(text, normalized=True) for text in ("<b>", "<b>>", "cc<")]
    model.add_tokens([*first, *second, *extra])
    if normalizing:
        model.normalizer = normalizers.Lowercase()
    return Tokenizer(model)


@lru_cache
def framed_tokenizer() -> Tokenizer:
    model = Backend.from_str(backend().to_str())
    model.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    return Tokenizer(model)


VOCABULARIES = {
    "small": small_tokenizer,
    "deepseek": deepseek_tokenizer,
    "odd": odd_tokenizer,
    "swallowing": lambda: odd_tokenizer(AddedToken("sat", lstrip=True, normalized=False), AddedToken("<c>", rstrip=True)),
    "looking": lambda: odd_tokenizer(AddedToken("sat", single_word=True, normalized=False)),
    "disguised": lambda: odd_tokenizer(AddedToken("Ġ", normalized=False)),
    "normalizing": lambda: odd_tokenizer(normalizing=True),
    "framed": framed_tokenizer,
}
PARTS = [
    "a", "the cat", " sat", "\n", "\n\n", "  ", "é", "🦙", "‍", "<", ">", "b", "c", "<a>", "<b>", "<c>", "<C>", "CAT",
    "Ġ", "12", "3", "<|im_", "im_end|>",
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "two words", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "｜DSML｜", "<｜", "｜>", "naïve",
]  # fmt: skip
_text = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
_edit = st.tuples(st.integers(0, 40), st.integers(0, 6), _text, st.sampled_from("pq"))


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(derandomize=True, max_examples=120, deadline=None)
@given(_text, st.lists(_edit, min_size=1, max_size=6))
def test_every_turn_and_edit_has_the_ids_and_keys_of_the_whole_text(
    name: str, text: str, edits: list[tuple[int, int, str, str]]
) -> None:
    vocabulary = VOCABULARIES[name]()
    cache = PromptCache(vocabulary)
    for back, removed, added, session in edits:
        at = max(0, len(text) - back)
        text = text[:at] + added + text[at + removed :]
        assert plain(cache.encode(text, scope(session))) == whole(vocabulary, text)
        assert plain(cache.encode(text, scope(session), specials=True)) == whole(vocabulary, text, specials=True)


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(derandomize=True, max_examples=120, deadline=None)
@given(_text, _text, _text)
def test_whatever_follows_a_cut_the_ids_before_it_stay_and_those_after_are_its_own(
    name: str, before: str, after: str, other: str
) -> None:
    vocabulary = VOCABULARIES[name]()
    text = before + after
    encoded = vocabulary.encode_cut(text)
    assert encoded.tokens == vocabulary.encode(text)
    for end, count in zip(encoded.ends, encoded.counts, strict=True):
        kept = text.encode()[:end].decode()
        assert vocabulary.encode(kept + other) == encoded.tokens[: 4 * count] + vocabulary.encode(other)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    st.text("<ab>c", max_size=5), st.sampled_from(["<a>", "<b>", "b<", "abc", "<b><b>", "cc<"]), st.text("<ab>c", max_size=5)
)
@example("", "cc<", "a>")
@example("", "<b>", ">")
def test_a_token_that_other_text_might_swallow_is_no_cut(before: str, token: str, other: str) -> None:
    vocabulary = odd_tokenizer()
    assert vocabulary.encode_cut("two words").ends, "no token of this vocabulary is a cut, so nothing is tested"
    encoded = vocabulary.encode_cut(before + token)
    for end, count in zip(encoded.ends, encoded.counts, strict=True):
        text = (before + token)[:end] + other
        assert vocabulary.encode(text) == encoded.tokens[: 4 * count] + vocabulary.encode(other)


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PARTS), st.text("<ab>cé", max_size=4)), max_size=8).map("".join))
def test_a_search_finds_the_added_tokens_that_encoding_finds(name: str, text: str) -> None:
    vocabulary = VOCABULARIES[name]()
    if not vocabulary._cuts.complete:
        assert name in ("swallowing", "looking", "disguised", "normalizing")
        return
    encoding = vocabulary._backend.encode(text, add_special_tokens=False)
    found = zip(encoding.ids, encoding.offsets, strict=True)
    assert vocabulary._cuts.search(text) == [(number, span) for number, span in found if number in vocabulary._added]


_pieces = st.lists(st.builds(Piece, _text, st.booleans()), max_size=5)


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(derandomize=True, max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), _pieces, st.sampled_from("pq")), min_size=1, max_size=5))
def test_pieces_have_the_ids_of_all_pieces_and_what_clients_spell_stays_text(
    name: str, edits: list[tuple[int, list[Piece], str]]
) -> None:
    vocabulary = VOCABULARIES[name]()
    cache, pieces = PromptCache(vocabulary), []
    for kept, added, session in edits:
        pieces = pieces[:kept] + added
        assert cache.encode_pieces(pieces, scope(session)).tokens == vocabulary.encode_pieces(pieces)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.text("12 \n\t", max_size=6), max_size=6))
def test_numbers_are_cut_at_their_last_space(parts: list[str]) -> None:
    vocabulary = NumberTokenizer(1 << 31)
    cache, text = PromptCache(vocabulary), ""
    for part in parts:
        text += part
        if all(len(word) < 10 for word in text.split()):
            assert plain(cache.encode(text, scope())) == whole(vocabulary, text)


def test_the_same_text_from_template_and_client_is_not_the_same_prompt() -> None:
    vocabulary, cache = small_tokenizer(), PromptCache(small_tokenizer())
    forged = [Piece("<|im_start|>", True), Piece("a<|im_end|>b", False)]
    honest = [Piece("<|im_start|>", True), Piece("a", False), Piece("<|im_end|>", True), Piece("b", False)]
    for pieces in (honest, forged, honest):
        assert cache.encode_pieces(pieces, scope()).tokens == vocabulary.encode_pieces(pieces)
    assert vocabulary.encode_pieces(honest) != vocabulary.encode_pieces(forged)


def test_a_turn_computes_only_what_follows_the_last_cut() -> None:
    cache = PromptCache(small_tokenizer())
    text = TURN * 50
    first = cache.encode(text, scope())
    assert (first.reused_tokens, first.left_at) == (0, None)
    second = cache.encode(text + TURN, scope())
    assert second.reused_tokens == len(first.tokens) // 4 - 1  # all but the line break after the last mark
    assert second.left_at is None
    assert cache.counts.encoded_tokens == len(second.tokens) // 4 + 1
    assert cache.counts.kept == 1  # the longer took the place of the shorter


def test_a_repeated_prompt_computes_nothing_even_without_any_cut() -> None:
    cache = PromptCache(small_tokenizer())
    text = "no marks here " * 10
    cache.encode(text, scope())
    again = cache.encode(text, scope())
    assert again.reused_tokens == len(again.tokens) // 4 and cache.counts.kept == 1


def test_where_a_session_left_its_last_prompt_is_told() -> None:
    cache = PromptCache(small_tokenizer())
    cache.encode(TURN * 3 + "code 12345", scope())
    before = len(small_tokenizer().encode(TURN * 3)) // 4
    assert cache.encode(TURN * 3 + "code 12399" + TURN, scope()).left_at in range(before, before + 10)
    assert cache.encode(TURN * 3, scope("other")).left_at is None


def test_a_new_session_goes_on_from_whoever_shares_most_of_its_beginning() -> None:
    cache = PromptCache(small_tokenizer())
    system = TURN * (STRIDE_BYTES // len(TURN) + 1)
    cache.encode(system + "one" + TURN * 400, scope("parent"))
    for number in range(20):
        cache.encode(system + f"{number}" + TURN, scope(f"cousin {number}"))
    child = cache.encode(system + "one" + TURN * 400 + "child", scope("child"))
    assert child.reused_tokens >= len(small_tokenizer().encode(system + "one" + TURN * 399)) // 4
    assert cache.counts.found == 21


def test_two_lines_of_one_session_do_not_push_each_other_out() -> None:
    cache = PromptCache(small_tokenizer())
    task, title = "<|im_start|>task\n" + TURN * 300, "<|im_start|>title\n" + TURN * 2
    cache.encode(task, scope())
    cache.encode(title, scope())
    for number in range(1, 4):
        task += TURN
        assert cache.encode(task, scope()).reused_tokens >= len(small_tokenizer().encode(TURN)) // 4 * (299 + number)
        cache.encode(title, scope())
    assert cache.counts.kept == 2


def test_a_session_that_always_departs_keeps_a_few_prompts_only() -> None:
    cache = PromptCache(small_tokenizer())
    for number in range(3 * MAX_FORKS):
        cache.encode(f"<|im_start|>{number}<|im_end|>{TURN}", scope())
    assert cache.counts.kept == MAX_FORKS


def test_nothing_is_shared_between_namespaces() -> None:
    cache = PromptCache(small_tokenizer())
    text = TURN * 400
    cache.encode(text, scope())
    other = CacheNamespace("m", "0", 4, "l", tenant_salt="b").root()
    assert cache.encode(text, scope(root=other)).reused_tokens == 0
    assert cache.encode(text, Scope(ROOT, 8, "s")).reused_tokens == 0


def test_memory_is_bounded_and_the_prompts_used_last_stay() -> None:
    cache = PromptCache(small_tokenizer(), max_bytes=60_000)
    for number in range(40):
        cache.encode(f"{number}" + TURN * 200, scope(f"s{number}"))
        assert cache.counts.kept_bytes <= 60_000
        assert cache.encode(f"{number}" + TURN * 200, scope(f"s{number}")).reused_tokens
    assert cache.encode("0" + TURN * 200, scope("s0")).reused_tokens == 0
    assert cache.counts.evicted >= 39 and cache.counts.kept >= 1
    assert PromptCache(small_tokenizer(), max_bytes=10).encode(TURN, scope()).reused_tokens == 0


def test_evicting_everything_leaves_nothing_behind() -> None:
    cache = PromptCache(small_tokenizer(), max_bytes=100_000)
    for number in range(30):
        cache.encode(f"{number}" + TURN * 200, scope(f"s{number % 7}"))
    cache.max_bytes = 3_000
    cache.encode("x", scope())
    assert (len(cache._kept), cache._places, len(cache._sessions)) == (1, {}, 1)
    assert cache._bytes == cache.counts.kept_bytes == next(iter(cache._kept)).num_bytes


def test_threads_get_the_ids_of_their_own_prompts() -> None:
    cache, vocabulary = PromptCache(small_tokenizer(), max_bytes=100_000), small_tokenizer()

    def turns(number: int) -> bool:
        text = f"<|im_start|>{number % 3}"
        for _ in range(20):
            text += TURN + f"{number} é"
            if plain(cache.encode(text, scope(f"{number % 2}"))) != whole(vocabulary, text):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(turns, range(8)))


def test_text_that_is_no_unicode_is_refused() -> None:
    cache = PromptCache(small_tokenizer())
    for call in (lambda: cache.encode("\ud800", scope()), lambda: cache.encode_pieces([Piece("\ud800", False)], scope())):
        with pytest.raises(RequestError, match="Unicode"):
            call()


def test_the_last_prompt_of_a_session_is_told_to_nobody_else() -> None:
    cache = PromptCache(small_tokenizer())
    first, second = Written(PromptText.whole("a")), Written(PromptText.whole("b"))
    for written in (first, second):
        cache.encode_written(written, Scope(b"root", 4, "s"))
    assert cache.last(Scope(b"root", 4, "s")) == second
    assert all(cache.last(other) is None for other in (Scope(b"other", 4, "s"), Scope(b"root", 4, "t"), Scope(b"root", 8, "s")))
