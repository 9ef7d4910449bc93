"""The console as a person uses it, in headless Chromium: `make console`. Pictures go to --pictures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from tests.gateway.processes import gateway, mock_engine

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

DESK, PHONE = {"width": 1200, "height": 860}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def address(chatml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice {sha256(b'open sesame').hexdigest()}\n")
    engines = [mock_engine(chatml, "--step-ms", "20", "--prefill-ms", "120") for _ in range(2)]
    named = [f"engine-{number}={where}" for number, (_, where) in enumerate(engines)]
    try:
        with gateway(chatml, named, "--api-keys-file", str(keys)) as (_, http, _rpc):
            yield f"http://{http}"
    finally:
        for process, _ in engines:
            process.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser, address: str) -> Iterator[object]:
    """A page with the key given; nothing may be reported on its console, the content policy's complaints included."""
    context = browser.new_context(viewport=DESK, color_scheme="light", base_url=address)
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto("/console/")
    opened.get_by_label("API key").fill("open sesame")
    yield opened
    context.close()
    assert complaints == []


def ask(page, text: str = "hello there") -> None:
    answers = page.locator(".message.assistant .figures").count()
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    playwright.expect(page.locator(".message.assistant .figures")).to_have_count(answers + 1, timeout=20_000)


def test_without_the_key_the_page_says_so(browser, address: str) -> None:
    context = browser.new_context(base_url=address)
    page = context.new_page()
    page.goto("/console/#fleet")
    playwright.expect(page.get_by_role("alert")).to_contain_text("needs an API key")
    page.get_by_label("API key").fill("open sesame")
    playwright.expect(page.get_by_role("heading", name="engine-0")).to_be_visible()
    playwright.expect(page.get_by_role("alert")).to_be_hidden()
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    page.reload()
    assert page.get_by_label("API key").input_value() == "open sesame", "the key outlives a reload"
    other = context.new_page()
    other.goto("/console/")
    assert other.get_by_label("API key").input_value() == "", "and is this tab's alone"
    context.close()


def test_chat_streams_and_shows_where_the_time_went(page, pictures) -> None:
    page.get_by_label("Tokens").fill("40")
    page.get_by_label("Message").fill("Tell me of katydids that sing at night. " * 8)
    page.get_by_label("Message").press("Enter")
    text = page.locator(".message.assistant .text")
    playwright.expect(text).not_to_be_empty()
    early = text.text_content()
    playwright.expect(page.get_by_role("button", name="Stop")).to_be_visible()
    figures = page.locator(".message.assistant .figures")
    playwright.expect(figures).to_contain_text("TPOT")
    assert len(early) < len(text.text_content()), "text came before the end"
    assert re.search(r"TTFT (\d{3} ms|\d\.\d\d s)", figures.text_content()), figures.text_content()
    playwright.expect(figures).to_contain_text("output 40")
    page.get_by_text("Where the time went").click()
    bars = page.get_by_role("list", name="Where the time went")
    playwright.expect(bars.get_by_role("listitem").filter(has_text="prefill")).to_be_visible()
    playwright.expect(bars.get_by_role("listitem").filter(has_text="decode")).to_be_visible()
    pictures(page, "console-chat")
    stored = page.evaluate("JSON.stringify([...Object.entries(sessionStorage), ...Object.entries(localStorage)])")
    assert "katydids" not in stored


def test_a_second_turn_has_its_cached_tokens_by_tier(page) -> None:
    page.get_by_label("Tokens").fill("4")
    ask(page, "a prompt of more than two blocks " * 30)
    ask(page, "go on")
    playwright.expect(page.locator(".message.assistant .figures").nth(1)).to_contain_text(
        re.compile(r"cached \S+ device")
    )


def test_an_answer_is_stopped_by_escape_and_the_chat_goes_on(page) -> None:
    page.get_by_label("Tokens").fill("2000")
    page.get_by_label("Message").fill("long")
    page.get_by_label("Message").press("Enter")
    playwright.expect(page.locator(".message.assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".message.failed")).to_contain_text("stopped")
    page.get_by_label("Tokens").fill("4")
    ask(page, "short")
    playwright.expect(page.locator(".message.assistant")).to_have_count(2)


def test_text_is_never_markup(page) -> None:
    page.get_by_label("Tokens").fill("2")
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("#log img, #log .text b").count() == 0
    playwright.expect(page.locator(".message.user")).to_contain_text("<b>bold</b>")


def test_views_by_keyboard(page, pictures) -> None:
    page.get_by_label("Tokens").fill("8")
    for text in ("first", "second " * 100):
        ask(page, text)
    page.locator("#log").focus()
    page.keyboard.press("2")
    playwright.expect(page.get_by_role("heading", name="Last requests")).to_be_visible()
    page.locator("#requests summary").first.focus()
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("list", name="Where the time went").first).to_be_visible()
    page.keyboard.press("3")
    playwright.expect(page.locator("#engines .card")).to_have_count(2)
    playwright.expect(page.locator("#tiles")).to_contain_text("2 of 2")
    pictures(page, "console-fleet")
    page.keyboard.press("4")
    page.get_by_label("Prompt").fill("where to? " * 50)
    page.get_by_role("button", name="Explain").click()
    playwright.expect(page.locator("#route-answer tr.chosen")).to_have_count(1)
    pictures(page, "console-route")
    page.get_by_label("Without engine").select_option("engine-0")
    page.get_by_role("button", name="Explain").click()
    playwright.expect(page.locator("#route-answer")).to_contain_text("left out")
    page.locator("h1:visible").click()
    page.keyboard.press("/")
    playwright.expect(page.get_by_label("Message")).to_be_focused()


def test_on_a_phone_and_in_the_dark(page, pictures) -> None:
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    page.get_by_label("Tokens").fill("30")
    ask(page, "Does it fit a narrow screen?")
    page.get_by_text("Where the time went").click()
    playwright.expect(page.get_by_role("list", name="Where the time went")).to_be_visible()
    pictures(page, "console-phone-dark")
    for view in ("chat", "requests", "fleet", "route"):
        page.goto(f"/console/#{view}")
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], (
            f"{view} is wider than the screen"
        )
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Switch between dark and light").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


def test_every_control_has_a_name_and_text_stands_out(page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select, a")]
             .filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim())
             .map((each) => each.outerHTML)"""
    )
    assert nameless == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for ink in ("--ink", "--quiet", "--accent", "--bad"):
            ratio = page.evaluate(_CONTRAST, ink)
            assert ratio >= 4.5, f"{ink} on {scheme} has a contrast of {ratio:.1f}"


# WCAG 2.2's relative luminance, of what the browser makes of two custom properties.
_CONTRAST = """(ink) => {
  const probe = document.body.appendChild(document.createElement("i"));
  const luminance = (name) => {
    probe.style.color = `var(${name})`;
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [one, other] = [luminance(ink), luminance("--sheet")].sort((a, b) => b - a);
  probe.remove();
  return (one + 0.05) / (other + 0.05);
}"""
