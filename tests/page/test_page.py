"""The page in a real browser. Pictures of it are left beside its profile, in the test's own folder, for a person to look at."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlsplit

from rackserve.base.events import RankChanged
from rackserve.base.request import Request
from rackserve.text.dsml import CALLS, CALLS_END, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END, DsmlTemplate
from rackserve.text.parsers import ParserChoice
from rackserve.text.tokenizer import unpack
from tests.api.rig import Script, text
from tests.page.chrome import Tab, browser
from tests.page.rig import KEY, KEYS, PREFILL, RANKS, Site, site, status
from tests.report.browser import needs_browser
from tests.text.small_model import byte_ids

pytestmark = needs_browser

EVIL = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\n\n"
    "[a](javascript:alert(1)) **bold <b>x</b>** `<i>`\n```html\n<script>window.hacked = 1</script>\n```\n- <svg onload=x>\n"
)
ANSWER = "document.querySelector('.assistant:last-of-type')"
DARK, LIGHT = "rgb(21, 24, 28)", "rgb(251, 251, 250)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def open_chat(tab: Tab, it: Site, width: int = 1100) -> None:
    tab.resize(width)
    tab.go(f"{it.url}/")
    tab.until("document.querySelector('#draft') && document.querySelector('.bar option')")


def ask(tab: Tab, question: str) -> None:
    tab.type("#draft", question)
    tab.press("Enter")


def assert_clean(tab: Tab, it: Site) -> None:
    """No complaint of the browser, and nothing asked of anyone else."""
    assert tab.complaints == []
    assert {urlsplit(url).netloc for url in tab.asked} == {urlsplit(it.url).netloc}


def test_an_answer_streams_with_what_it_cost_and_what_it_says_is_never_markup(tmp_path: Path) -> None:
    with site(text(EVIL, groups=(3,), cached=16, attempts=2)) as it, browser(tmp_path) as tab:
        open_chat(tab, it)
        ask(tab, "<img src=x onerror='window.hacked = 1'>")
        tab.until("document.querySelector('.facts')")
        tab.shoot(tmp_path / "chat.png")
        said = tab.run(f"{ANSWER}.innerText")
        for part in (
            "<script>window.hacked = 1</script><img src=x onerror=",
            "[a](javascript:alert(1))",
            "bold <b>x</b>",
            "<svg onload=x>",
        ):
            assert part in said
        assert tab.run(
            "window.hacked === undefined && !document.querySelector('.log img, .log script, .log a, .log b, .log svg')"
        )
        facts = tab.run(
            "Object.fromEntries([...document.querySelectorAll('.facts div')].map((row) => row.innerText.split('\\n')))"
        )
        prompt = it.rig.frontend.submitted[0].num_tokens
        assert facts["Prompt"] == f"{prompt} tokens" and facts["Computed"] == str(prompt - 16)
        assert facts["Reused"].startswith("16 (") and facts["Attempts"] == "2" and facts["Model"] == "tiny"
        assert facts["Answer"] == f"{len(byte_ids(EVIL)) + 1} tokens" and facts["First token"].endswith("s")
        assert_clean(tab, it)


def test_the_conversation_goes_on_with_settings_in_one_session_until_a_new_one(tmp_path: Path) -> None:
    with site(text("ok")) as it, browser(tmp_path) as tab:
        open_chat(tab, it)
        tab.run("document.querySelector('.settings').open = true")
        tab.type(".settings textarea", "be brief")
        tab.type(".settings label:nth-child(2) input", "7")
        tab.run("document.querySelector('.settings').open = false")
        ask(tab, "one")
        tab.until("document.querySelectorAll('.facts').length === 1")
        ask(tab, "two")
        tab.until("document.querySelectorAll('.facts').length === 2")
        tab.run("document.querySelector('.bar button').click()")
        tab.until("!document.querySelector('.message')")
        ask(tab, "three")
        tab.until("document.querySelectorAll('.facts').length === 1")
        first, second, third = it.rig.frontend.submitted
        assert first.max_tokens == second.max_tokens == 7
        assert first.session == second.session != third.session
        prompts = [it.rig.factory.tokenizer.decode(list(request.tokens)) for request in (first, second, third)]
        assert "system\nbe brief" in prompts[0] and "ok" in prompts[1] and "two" in prompts[1] and "one" not in prompts[2]
        assert_clean(tab, it)


def test_stop_ends_the_answer_on_the_server_and_keeps_what_came(tmp_path: Path) -> None:
    with site(Script(ids=tuple(byte_ids("so far")), hold=True)) as it, browser(tmp_path) as tab:
        open_chat(tab, it)
        ask(tab, "go")
        tab.until(f"{ANSWER}.innerText.includes('so far')")
        assert tab.run(f"{ANSWER}.getAttribute('aria-busy')") == "true"
        tab.run("document.querySelector('.ask button.main').click()")
        tab.until(f"{ANSWER}.innerText.includes('stopped')")
        end = time.monotonic() + 10
        while not it.rig.frontend.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        assert len(it.rig.frontend.cancelled) == 1 and "so far" in tab.run(f"{ANSWER}.innerText")
        assert_clean(tab, it)


def test_errors_are_said_in_the_server_s_words_and_the_chat_goes_on(tmp_path: Path) -> None:
    def script(request: Request) -> Script:
        return Script(ids=tuple(byte_ids("half")), error="output_lost") if request.num_tokens < 40 else text("fine")

    with site(script) as it, browser(tmp_path) as tab:
        open_chat(tab, it)
        ask(tab, "a")
        tab.until("document.querySelector('.error')")
        assert "scripted" in tab.run("document.querySelector('.error').innerText")
        ask(tab, "long " * 200)
        tab.until("document.querySelectorAll('.error').length === 2")
        assert "(400" in tab.run("document.querySelectorAll('.error')[1].innerText")
        assert [line for line in tab.complaints if "400" not in line] == []  # the browser itself logs refused requests


def test_a_key_is_asked_for_and_never_kept_by_the_page(tmp_path: Path) -> None:
    with site(text("hello"), KEYS) as it, browser(tmp_path) as tab:
        tab.go(f"{it.url}/")
        tab.until("document.querySelector('#key')")
        tab.resize(700, 480)
        tab.shoot(tmp_path / "form.png")
        tab.type("#key", "wrong")
        tab.press("Enter")
        tab.until("document.querySelector('[role=alert]')")
        tab.type("#key", KEY)
        tab.press("Enter")
        tab.until("document.querySelector('.bar option')")
        ask(tab, "hi")
        tab.until("document.querySelector('.facts')")
        kept = tab.run(
            "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, document.body.innerHTML])"
        )
        assert KEY not in kept and "rackserve_session" not in kept
        assert all(KEY not in url for url in tab.asked)
        tab.until("document.querySelector('header form')")
        tab.run("document.querySelector('header form button').click()")
        tab.until("document.querySelector('#key')")
        assert {"401" in line for line in tab.complaints} == {True}  # the browser itself logs the refusals, and nothing else


def test_the_rack_is_shown_and_follows_what_happens(tmp_path: Path) -> None:
    with site(text("x")) as it, browser(tmp_path) as tab:
        tab.resize(1200, 1300)
        tab.go(f"{it.url}/#rack")
        tab.until(
            "document.querySelectorAll('.ranks tbody tr').length === 3 && document.querySelectorAll('canvas').length === 4"
        )
        rows = tab.run("[...document.querySelectorAll('.ranks tbody tr')].map((row) => row.innerText)")
        assert [row.split()[:2] for row in rows] == [["prefill0.0", "up"], ["prefill1.0", "down"], ["decode0.0", "up"]]
        assert tab.run("document.querySelector('.ranks tr:nth-child(1) td:nth-child(3)').innerText") == "2"
        assert "30 %" in rows[0] and "tok/s/user" in tab.run("document.querySelector('#rack').innerText")
        assert tab.run("document.querySelectorAll('.trail').length") > 20 and tab.run("!!document.querySelector('.frontier')")
        tab.until("document.querySelectorAll('.flow').length === 3")
        tab.shoot(tmp_path / "rack.png")
        it.view.look = lambda: ((status("prefill0", "prefill", "failed", ()), *RANKS[1:]), None)
        it.tell(RankChanged(PREFILL, "failed", 1))
        tab.until("document.querySelector('.ranks tbody tr').innerText.includes('failed')")
        tab.until("document.querySelector('#rack [role=status]').innerText.includes('prefill0.0 is failed')")
        tab.until("document.querySelectorAll('.flow').length === 1")  # its pool went, too
        assert_clean(tab, it)


def test_colours_follow_the_system_until_someone_chooses_and_are_remembered(tmp_path: Path) -> None:
    with site(text("x")) as it, browser(tmp_path) as tab:
        tab.prefer(prefers_color_scheme="light")
        tab.go(f"{it.url}/#rack")
        tab.until(f"document.querySelector('canvas') && {BACKGROUND} === '{LIGHT}'")
        tab.prefer(prefers_color_scheme="dark")
        tab.until(f"{BACKGROUND} === '{DARK}'")
        tab.shoot(tmp_path / "dark.png")
        box = "document.querySelector('.theme select')"
        tab.run(f"{box}.value = 'light', {box}.dispatchEvent(new Event('change'))")
        tab.until(f"{BACKGROUND} === '{LIGHT}'")
        tab.go(f"{it.url}/?again#rack")
        tab.until(f"document.querySelector('canvas') && {BACKGROUND} === '{LIGHT}'")
        assert_clean(tab, it)


def test_it_fits_a_narrow_window_moves_for_none_who_ask_for_calm_and_works_by_keyboard(tmp_path: Path) -> None:
    with site(text(EVIL + "x" * 90)) as it, browser(tmp_path) as tab:
        tab.prefer(prefers_reduced_motion="reduce")
        open_chat(tab, it, width=400)
        ask(tab, "y" * 60)
        tab.until("document.querySelector('.facts')")
        assert tab.run("document.documentElement.scrollWidth") <= 400
        tab.shoot(tmp_path / "narrow_chat.png")
        tab.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
        tab.press("ArrowRight")
        tab.until("location.hash === '#rack' && document.activeElement.id === 'tab-rack' && document.querySelector('canvas')")
        assert tab.run("document.documentElement.scrollWidth") <= 400
        assert tab.run(
            "[...document.querySelectorAll('.flow path')].every((path) => getComputedStyle(path).animationName === 'none')"
        )
        tab.resize(400, 2100)
        tab.shoot(tmp_path / "narrow_rack.png")
        inputs = "[...document.querySelectorAll('button, select, input, textarea')]"
        named = f"{inputs}.every((it) => it.labels?.length || it.innerText.trim())"
        assert tab.run(named) and tab.run("document.documentElement.lang") == "en"
        assert_clean(tab, it)


def test_a_model_without_a_chat_template_goes_on_with_the_text_and_says_so(tmp_path: Path) -> None:
    with site(text(" and more"), template=None) as it, browser(tmp_path) as tab:
        open_chat(tab, it)
        ask(tab, "the cat sat")
        tab.until("document.querySelectorAll('.facts').length === 1")
        assert "no chat template" in tab.run("document.querySelector('.completing').innerText")
        assert "and more" in tab.run(f"{ANSWER}.innerText") and not tab.run("document.querySelector('.error')")
        tab.run("document.querySelector('.settings').open = true")
        assert tab.run("!document.querySelector('.settings textarea')")  # a system prompt would have no effect
        tab.shoot(tmp_path / "completing.png")
        ask(tab, " on the mat")
        tab.until("document.querySelectorAll('.facts').length === 2")
        first, second = it.rig.frontend.submitted
        decode = it.rig.factory.tokenizer.decode
        assert decode(list(unpack(first.tokens))) == "the cat sat" and first.session == second.session
        assert decode(list(unpack(second.tokens))) == "the cat sat and more on the mat"
        assert {urlsplit(url).netloc for url in tab.asked} == {urlsplit(it.url).netloc}
        assert [line for line in tab.complaints if "400" not in line] == []  # the browser itself logs the refusal of the chat


def test_while_the_model_loads_the_page_is_there_and_waits_for_it(tmp_path: Path) -> None:
    with site(text("hello"), KEYS, loading=True) as it, browser(tmp_path) as tab:
        tab.go(f"{it.url}/")
        tab.until("document.querySelector('#key')")
        tab.type("#key", KEY)
        tab.press("Enter")
        tab.until("document.querySelector('.loading')")
        assert "being loaded" in tab.run("document.querySelector('.log').innerText")
        tab.type("#draft", "hi")
        assert tab.run("document.querySelector('.ask button').disabled")
        tab.shoot(tmp_path / "loading.png")
        tab.run("location.hash = 'rack'")
        tab.until("document.querySelectorAll('.ranks tbody tr').length === 3")
        tab.run("location.hash = 'chat'")
        it.open()
        tab.until("!document.querySelector('.loading') && document.querySelector('.bar option')")
        tab.run("document.querySelector('#draft').focus()")
        tab.press("Enter")
        tab.until("document.querySelector('.facts')")
        assert "hello" in tab.run(f"{ANSWER}.innerText")
        assert [line for line in tab.complaints if "503" not in line and "401" not in line] == []


def test_reasoning_and_tool_calls_are_folded_and_never_markup(tmp_path: Path) -> None:
    parameter = f'{PARAMETER} name="path" string="true"><img src=x onerror=1>{PARAMETER_END}'
    said = f'hm {EVIL}</think>so{CALLS}\n{INVOKE} name="read">\n{parameter}\n{INVOKE_END}\n{CALLS_END}'
    deepseek = {"template": DsmlTemplate(), "parsers": ParserChoice("deepseek_v41", "deepseek_v41"), "max_model_len": 4096}
    with site(text(said, groups=(5,)), **deepseek) as it, browser(tmp_path) as tab:
        open_chat(tab, it)
        ask(tab, "read it")
        tab.until("document.querySelector('.facts')")
        folds = "[...document.querySelectorAll('.assistant details')]"
        assert tab.run(f"{folds}.map((it) => [it.className, it.open])") == [["reasoning", False], ["call", False]]
        assert tab.run("document.querySelector('.text').innerText.trim()") == "so"
        tab.run(f"{folds}.forEach((it) => it.open = true)")
        tab.shoot(tmp_path / "folds.png")
        tab.prefer(prefers_color_scheme="dark")
        tab.until(f"{BACKGROUND} === '{DARK}'")
        tab.shoot(tmp_path / "dark_folds.png")
        reasoning, call = tab.run(f"{folds}.map((it) => it.innerText)")
        assert "<script>window.hacked = 1</script>" in reasoning and "<img src=x onerror=1>" in call and "read" in call
        assert tab.run("window.hacked === undefined && !document.querySelector('.log img, .log script, .log a, .log svg')")
        assert_clean(tab, it)


def test_pages_of_other_sites_and_other_names_for_this_machine_get_nothing(tmp_path: Path) -> None:
    with site(text("secret")) as it, browser(tmp_path, "--host-resolver-rules=MAP evil.test 127.0.0.1") as tab:
        tab.go("data:text/html,<p>another site</p>")
        tab.until("document.querySelector('p')")
        read = f"fetch('{it.url}/v1/models').then((r) => r.text(), () => 'blocked')"
        assert tab.run(read) == "blocked"
        body = '{"messages": [{"role": "user", "content": "x"}]}'
        sent = f"fetch('{it.url}/v1/chat/completions', {{method: 'POST', mode: 'no-cors', body: '{body}'}})"
        assert tab.run(f"{sent}.then((r) => r.type, () => 'blocked')") in ("blocked", "opaque")
        tab.go(it.url.replace("127.0.0.1", "evil.test"))
        tab.until("document.body.innerText.includes('wrong_host')")
        assert not it.rig.frontend.submitted
