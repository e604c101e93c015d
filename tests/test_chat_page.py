"""The page at `/` in a real browser: a conversation with the bundled model."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
from browser import Browser
from processes import wait_until
from serving import Gate, Served, serving

from specgen.base.text import inline
from specgen.pair.pair import Pair
from specgen.serve import queue
from specgen.serve.access import Access
from specgen.serve.chat_page import chat_page
from specgen.serve.queue import Asked, Job, Worker
from specgen.view.generation import AnswerText, Piece
from specgen.view.theme import _LOOKS, FLAVOURS

# its answer has all three colours
QUESTION = "What does a cook do?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ROUNDS = {"specgen": {"rounds": True}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What the server is asked for."""
    found: list[Asked] = []
    submit = Worker.submit

    def noted(worker: Worker, asked: Asked) -> Job:
        found.append(asked)
        return submit(worker, asked)

    monkeypatch.setattr(Worker, "submit", noted)
    return found


class Chat:
    """The page, as a person uses it."""

    def __init__(self, browser: Browser, served: Served, **view: Any) -> None:
        self.browser = browser
        browser.open(served.address, **view)
        browser.driver.execute_script("localStorage.clear()")
        browser.open(served.address, **view)

    def type(self, *keys: str) -> None:
        self.browser.find("#prompt")[0].send_keys(*keys)

    def ask(self, text: str) -> None:
        """Sends a question, and waits until its answer has ended."""
        before = len(self.browser.find(".turn"))
        self.type(text, "\n")
        assert wait_until(lambda: len(self.browser.find(".turn")) == before + 2)
        self.wait()

    def wait(self) -> None:
        assert wait_until(lambda: self.browser.find("#send")[0].is_displayed())

    def press(self, name: str) -> None:
        """Presses the last button with this text."""
        buttons = [button for button in self.browser.find("button") if button.text == name]
        buttons[-1].click()

    def set(self, field: str, value: str) -> None:
        """Types into a field of the settings, which it opens and closes."""
        self.press("Settings")
        element = self.browser.find(field)[0]
        element.clear()
        element.send_keys(value)
        self.press("Settings")

    def show(self, drafts: str) -> None:
        self.browser.find(f"[name=drafts][value={drafts}]")[0].click()

    def texts(self, selector: str) -> list[str]:
        return self.browser.texts(selector)

    def answers(self) -> list[str]:
        """The answers without what was not accepted."""
        script = (
            "return [...document.querySelectorAll('.assistant .text')].map(text => {"
            "const copy = text.cloneNode(true);"
            "copy.querySelectorAll('.gone, button').forEach(gone => gone.remove());"
            "return copy.textContent; })"
        )
        found: list[str] = self.browser.driver.execute_script(script)
        return found


@pytest.fixture
def chat(browser: Browser, served: Served) -> Chat:
    return Chat(browser, served)


def rgb(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"


@pytest.mark.parametrize("dark", [False, True])
def test_an_answer_has_the_terminals_colours(
    browser: Browser, served: Served, demo_pair: Pair, dark: bool
) -> None:
    chat = Chat(browser, served, dark=dark)
    chat.ask(QUESTION)
    assert chat.answers() == [demo_pair.generate(MESSAGES, "svip").text.removeprefix(" ")]
    _, _, whole = served.ask("/v1/chat/completions", {"messages": MESSAGES, **ROUNDS})
    rounds = whole["specgen"]["rounds"]
    shown = [piece for round_ in rounds for piece in round_["shown"]]
    expected = {"accepted": "".join(piece["text"] for piece in shown if piece["drafted"])}
    for status in ("rejected", "discarded"):
        expected[status] = "".join(
            inline(text)
            for round_ in rounds
            for text, own in zip(round_["draft_texts"], round_["statuses"], strict=True)
            if own == status
        )
    for status, text in expected.items():
        assert text
        assert "".join(chat.texts(f".text .{status}")) == text
        colour = _LOOKS[f"token.{status}"][FLAVOURS.index("dark" if dark else "light")]
        assert browser.css(f".text .{status}", "color") == rgb(colour.split()[0])
    assert browser.css(".text .rejected", "textDecorationLine") == "line-through"
    passes = sum(round_["target_passes"] for round_ in rounds)
    tokens = whole["usage"]["completion_tokens"]
    figures = chat.texts(".figures")[0]
    assert figures.startswith(f"{tokens} tokens · ")
    assert " tokens/s · " in figures
    assert f" · {tokens / passes:.2f} tokens a pass · " in figures


def test_colours_can_be_switched_off_and_stay_off(chat: Chat, browser: Browser) -> None:
    chat.ask(QUESTION)

    def looks() -> tuple[bool, bool]:
        """Whether drafts that are gone are shown, and whether accepted ones have a colour."""
        gone = browser.find(".text .gone")[0].is_displayed()
        return gone, browser.css(".text .accepted", "color") != browser.css("body", "color")

    assert looks() == (True, True)
    chat.show("accepted")
    assert looks() == (False, True)
    chat.show("none")
    assert looks() == (False, False)
    browser.driver.refresh()
    chat.ask(QUESTION)
    assert looks() == (False, False)


def test_text_comes_while_it_is_generated_and_escape_stops_it(
    browser: Browser, demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(demo_pair, "ar") as served:
        chat = Chat(browser, served)
        gate.open(2)
        chat.type(QUESTION, "\n")
        assert wait_until(lambda: "2 tokens" in "".join(chat.texts(".figures")))
        assert browser.find(".waiting")
        assert not browser.find("#send")[0].is_displayed()
        assert not browser.find("#new")[0].is_enabled()
        chat.type("\ue00c")  # Escape
        chat.wait()
        gate.open(100)
        assert wait_until(lambda: len(served.log) == 1)
        assert "client gone" in served.log[0]
        assert chat.texts(".figures")[0].endswith("stopped")
        assert not browser.find(".waiting")
        assert "Compare with plain decoding" not in chat.texts(".tools button")


def test_plain_decoding_answers_the_same(chat: Chat, asked: list[Asked]) -> None:
    chat.set("#limit", "30")
    chat.ask(QUESTION)
    chat.press("Compare with plain decoding")
    assert wait_until(lambda: chat.texts(".compared p"))
    times_and_texts = r"(Too short to compare times|[\d.]+× as fast)\. The texts are equal\."
    assert re.fullmatch(times_and_texts, chat.texts(".compared p")[0])
    assert chat.texts(".compared dt") == ["svip", "plain decoding"]
    times = chat.texts(".compared .time")
    assert all(re.fullmatch(r"[\d.]+ m?s", time) for time in times)
    assert [request.method for request in asked] == [None, "ar"]
    assert asked[0].prompts == asked[1].prompts
    assert asked[0].sampling == asked[1].sampling
    assert asked[0].sampling.max_new_tokens == 30


@pytest.mark.parametrize(
    ("drafted", "seconds", "sentence"),
    [
        (8, 1.5, "1.50× as fast. "),
        (8, 0.69, "Too short to compare times. "),
        (0, 1.5, "Nothing was drafted. "),
    ],
)
def test_what_the_times_say(chat: Chat, drafted: int, seconds: float, sentence: str) -> None:
    """Of 30 tokens a second instead of 20, half a second after the first one of the answer."""
    times = {"first_token_seconds": 0.5}
    own = {**times, "drafted": drafted, "seconds": seconds, "decode_tokens_per_second": 30}
    plain = {**times, "seconds": 2.0, "decode_tokens_per_second": 20}
    script = "return speedup(arguments[0], arguments[1])"
    assert chat.browser.driver.execute_script(script, own, plain) == sentence


def test_texts_that_differ_are_not_called_equal(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.ask(QUESTION)
    monkeypatch.setattr(Worker, "_request", other_question)
    chat.press("Compare with plain decoding")
    assert wait_until(lambda: chat.texts(".compared p"))
    assert "The texts differ from character " in chat.texts(".compared p")[0]
    assert chat.texts(".compared .text")[0]


def other_question(worker: Worker, prompt: Any, sampling: Any, asked: Asked) -> Any:
    return worker.pair.request("def area(width, height):", "ar", sampling)


MARKUP = "<img src=x onerror=\"document.title='seen'\"><b>bold</b> &amp; "


class Scripted(AnswerText):
    """Shows the pieces of text that a test sets, whatever the tokens are."""

    pieces: ClassVar[list[str]] = []

    def add(self, round_: Any) -> list[Piece]:
        super().add(round_)
        taken, Scripted.pieces = Scripted.pieces[:2], Scripted.pieces[2:]
        return [Piece(text, place == 0) for place, text in enumerate(taken)]

    def finish(self) -> list[Piece]:
        taken, Scripted.pieces = Scripted.pieces, []
        return [Piece(text, False) for text in taken]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(queue, "AnswerText", Scripted)
    return Scripted


def test_no_text_becomes_markup(
    chat: Chat, browser: Browser, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = queue._round_line

    def of_markup(*given: Any) -> dict[str, Any]:
        line = original(*given)
        return line | {"draft_texts": [MARKUP for _ in line["draft_texts"]], "stop_reason": MARKUP}

    monkeypatch.setattr(queue, "_round_line", of_markup)
    scripted.pieces = [MARKUP, MARKUP, MARKUP]
    chat.ask(f"{MARKUP}?")
    assert chat.answers() == [MARKUP * 3]
    assert chat.texts(".user .text") == [f"{MARKUP}?"]
    assert MARKUP in "".join(chat.texts(".text .gone"))
    assert not browser.find("main img, main b")
    assert "seen" not in browser.driver.title


def test_code_is_a_block_of_its_own(chat: Chat, browser: Browser, scripted: type[Scripted]) -> None:
    scripted.pieces = ["Like this:\n``", "`py\nx = 1\n", "  y = 2\n```", "\nThat is", " ``` all."]
    chat.ask(QUESTION)
    assert chat.texts(".assistant .code > :not(.gone)") != []
    whole = "Like this:\n```py\nx = 1\n  y = 2\n```\nThat is ``` all."
    assert chat.answers() == [whole]
    script = (
        "const copy = document.querySelector('.code').cloneNode(true);"
        "copy.querySelectorAll('.gone').forEach(gone => gone.remove()); return copy.textContent"
    )
    assert browser.driver.execute_script(script) == "```py\nx = 1\n  y = 2\n```\n"
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    read = "navigator.clipboard.readText().then(arguments[0])"
    browser.find(".block button")[0].click()
    assert wait_until(lambda: browser.find(".block button")[0].text == "Copied")
    assert browser.driver.execute_async_script(read) == "x = 1\n  y = 2\n"
    browser.find(".assistant .tools button")[0].click()
    assert wait_until(lambda: browser.driver.execute_async_script(read) == whole)


def test_settings_and_turns_are_sent(chat: Chat, asked: list[Asked]) -> None:
    chat.set("#system", "Be brief.")
    chat.set("#temperature", "0.7")
    chat.type("one\ue008\n\ue000two")  # Shift and Enter: a new line
    chat.ask("")
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "one\ntwo"}
    assert asked[0].prompts == [[system, question]]
    assert asked[0].sampling.temperature == 0.7
    assert asked[0].rounds

    chat.ask("And then?")
    first = chat.answers()[0]
    then = {"role": "user", "content": "And then?"}
    assert asked[1].prompts == [
        [system, question, {"role": "assistant", "content": first}, then],
    ]

    chat.press("Regenerate")
    assert wait_until(lambda: len(asked) == 3)
    chat.wait()
    assert asked[2].prompts == asked[1].prompts
    assert len(chat.browser.find(".turn")) == 4

    chat.press("Edit")  # the second question
    assert len(chat.browser.find(".turn")) == 2
    chat.ask(" Why?")
    assert asked[3].prompts[0][-1] == {"role": "user", "content": "And then? Why?"}

    chat.press("New chat")
    assert not chat.browser.find(".turn")
    assert chat.browser.find("#welcome")[0].is_displayed()
    chat.ask("Again")
    assert asked[4].prompts == [[system, {"role": "user", "content": "Again"}]]


def test_the_key_is_asked_for_and_not_stored(browser: Browser, demo_pair: Pair) -> None:
    with serving(demo_pair, access=Access("127.0.0.1", key="the-key")) as served:
        chat = Chat(browser, served)
        assert wait_until(lambda: browser.find("#key")[0].is_displayed())
        browser.find("#key")[0].send_keys("another\n")
        assert wait_until(lambda: browser.find("#key-title")[0].text == "That key is wrong")
        browser.find("#key")[0].send_keys("the-key\n")
        assert wait_until(lambda: chat.texts("#model") == ["demo/target · svip"])
        assert not browser.find("#key")[0].is_displayed()
        chat.ask(QUESTION)
        assert chat.answers() != [""]
        stored = browser.driver.execute_script(
            "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        )
        assert "key" not in stored
        assert "the-key" not in browser.driver.page_source
        browser.driver.refresh()
        assert wait_until(lambda: browser.find("#key")[0].is_displayed())
        browser.find("#key")[0].send_keys("\ue00c")
        assert wait_until(lambda: "needs a key" in browser.find("#problem")[0].text)


def test_errors_are_one_line_and_the_conversation_goes_on(
    browser: Browser, demo_pair: Pair, asked: list[Asked]
) -> None:
    with serving(demo_pair) as served:
        chat = Chat(browser, served)
        script = "document.getElementById('prompt').value = 'word '.repeat(3000)"
        browser.driver.execute_script(script)
        chat.ask("")
        (problem,) = chat.texts(".assistant .problem")
        assert "context" in problem
        assert "\n" not in problem
        chat.ask(QUESTION)
        assert asked[-1].prompts == [MESSAGES], "the question without an answer is left out"
        served.server.end()
        assert wait_until(lambda: not served.server._uvicorn.servers[0].is_serving())
        chat.ask(QUESTION)
        assert chat.texts(".assistant .problem")[-1] in (
            "The server cannot be reached.",
            "the server is ending",
        )
        chat.wait()


@pytest.mark.parametrize(("width", "dark"), [(390, True), (390, False), (1100, False)])
def test_the_page_fits_and_loads_nothing(
    browser: Browser, served: Served, width: int, dark: bool
) -> None:
    chat = Chat(browser, served, width=width, dark=dark)
    chat.set("#limit", "20")
    chat.ask(f"{QUESTION} {'x' * 200}")
    chat.press("Compare with plain decoding")
    assert wait_until(lambda: chat.texts(".compared p"))
    browser.driver.execute_script("document.getElementById('model').textContent = 'm'.repeat(200)")
    chat.press("Settings")
    # a phone zooms out until a page that is too wide fits
    script = "return [innerWidth, document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert browser.driver.execute_script(script) == [width] * 3
    assert browser.css("body", "backgroundColor") == (rgb("#0d1117") if dark else rgb("#ffffff"))
    addresses = {url for url in browser.requests() if not url.startswith("data:")}
    page = f"{served.address}/"
    assert addresses == {page, f"{page}v1/models", f"{page}v1/chat/completions"}
    assert browser.driver.get_log("browser") == []

    chosen = "light" if dark else "dark"
    browser.find(f"#look option[value={chosen}]")[0].click()
    assert browser.css("body", "backgroundColor") == (rgb("#ffffff") if dark else rgb("#0d1117"))


def test_everything_has_a_name_for_screen_readers(chat: Chat, browser: Browser) -> None:
    chat.ask(QUESTION)
    chat.press("Settings")
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = ("button", "textbox", "spinbutton", "combobox", "radio", "searchbox")
    found = [
        (node["role"]["value"], node["name"]["value"])
        for node in tree
        if not node["ignored"] and node["role"]["value"] in controls
    ]
    assert len(found) > 10
    assert all(name for _, name in found)
    assert {role for role, _ in found} == {*controls[:5]}
    read = "".join(
        node["name"]["value"]
        for node in tree
        if not node["ignored"] and node["role"]["value"] == "StaticText"
    )
    assert chat.answers()[0][:12] in read
    (rejected, *_) = chat.texts(".text .rejected")
    assert inline(rejected) not in [
        node["name"]["value"] for node in tree if not node["ignored"] and "name" in node
    ]


def test_the_pages_policy_allows_its_own_script_and_nothing_else(served: Served) -> None:
    status, headers, html = served.ask("/")
    assert (status, html) == (200, chat_page().html)
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert re.findall(r"(?:src|href)=\"(?!data:)", html) == []
    assert "innerHTML" not in html
    assert "insertAdjacentHTML" not in html
    assert served.ask("/", {})[0] == 405
