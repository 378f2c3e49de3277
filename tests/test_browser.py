"""The built site in a real browser: in light and dark, on a phone, by keyboard, without scripts."""

import functools
import gzip
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from typing import NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from book_files import ROOT, SECTIONS, built, cells, formulas, home, html_of, html_pages, text_of
from playwright.sync_api import sync_playwright

PAGES = html_pages()
SWITCHES = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
]
PHONES = [390, 320]
WIDE = {"width": 1280, "height": 900}
LIMIT = 200_000  # bytes that the first visit of a page may take, gzipped
COLOURS = ["color-contrast", "link-in-text-block"]  # all that may differ between the schemes


class Visit(NamedTuple):
    """What was seen on a page."""

    messages: list  # of the console, and errors of scripts
    foreign: list  # requests to other hosts
    failed: list  # requests without a good answer
    weight: dict  # address → bytes, gzipped
    light: list  # violations that axe found
    dark: list
    wide_parts: dict  # width of the screen → what does not fit into it
    cut_off: list  # formulas that do not fit into the column of a wide screen


@pytest.fixture(scope="session")
def origin():
    """Serve the site at the path that it believes to have; give the address of its root."""
    base = urllib.parse.urlparse(home()).path
    folder = str(built())

    class Server(http.server.SimpleHTTPRequestHandler):
        """Answer below the base path only, and say nothing."""

        def translate_path(self, path):
            inside = path.startswith(base)
            return super().translate_path("/" + path.removeprefix(base) if inside else "/nowhere")

        def do_GET(self):
            if not self.path.endswith("/sitemap.xml"):
                return super().do_GET()
            # Instant navigation reads there which addresses belong to the site.
            here = f"http://{self.headers['Host']}{base}"
            content = text_of("sitemap.xml").replace(home(), here).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Server, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{base}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def browser():
    """Start the one browser of all these tests."""
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if not path:
        pytest.fail(
            "There is no browser to test with: sudo apt-get install chromium", pytrace=False
        )
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        yield chromium
        chromium.close()


@pytest.fixture
def window(browser):
    """Give a function that opens a page in a context of its own."""
    contexts = []

    def go(address, **options):
        contexts.append(browser.new_context(**{"viewport": WIDE, **options}))
        page = contexts[-1].new_page()
        page.goto(address)
        return page

    yield go
    for context in contexts:
        context.close()


SEEN = {}

STICKING_OUT = """
width => {
  const scrolls = element => {
    for (let box = element; box && box !== document.body; box = box.parentElement) {
      const style = getComputedStyle(box);
      if (style.overflowX !== "visible" || style.position === "fixed") return true;
    }
    return false;
  };
  const found = [];
  for (const element of document.querySelectorAll("main *, header *, footer *")) {
    const box = element.getBoundingClientRect();
    if (box.width > 0 && box.right > width + 1 && !scrolls(element)) found.push(
      `${element.tagName}.${element.getAttribute("class")}: ${element.textContent.slice(0, 60)}`);
  }
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.unshift(`page of ${root.scrollWidth} pixels`);
  return found;
}
"""

CUT_OFF = """
() => [...document.querySelectorAll(".book-scroll:has(.katex-display)")]
  .filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => `${box.scrollWidth} pixels in ${box.clientWidth}: ${box.textContent.slice(0, 60)}`)
"""


# A token of each kind stays in the listings, a formula becomes one text: what axe looks at
# for their sake is the same as before, in a third of the time.
SIMPLIFY = """
() => {
  const seen = new Set();
  for (const token of document.querySelectorAll(".highlight code span")) {
    if (seen.has(token.className)) token.replaceWith(...token.childNodes);
    seen.add(token.className);
  }
  for (const part of document.querySelectorAll(".highlight code")) part.normalize();
  for (const part of document.querySelectorAll(".katex-html")) part.textContent = part.textContent;
}
"""


def violations(page, rules=None):
    """Return what axe finds."""
    options = {"resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = {"type": "rule", "values": rules}
    return [
        f"{found['id']}: {found['help']}: {node['html'][:200]}: {node['failureSummary'][:300]}"
        for found in Axe().run(page, options=options).response["violations"]
        for node in found["nodes"]
    ]


@pytest.fixture
def visit(browser, origin):
    """Give a function that visits a page once and tells what was seen there."""

    def look(name):
        if name not in SEEN:
            context = browser.new_context(viewport=WIDE, color_scheme="light")
            SEEN[name] = watch(context.new_page(), origin, name)
            context.close()
        return SEEN[name]

    return look


def watch(page, origin, name):
    """Look at a page in light and dark, wide and narrow."""
    messages, foreign, failed, answers = [], [], [], []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    page.on("requestfailed", lambda request: failed.append(f"{request.url}: {request.failure}"))
    page.on("response", lambda answer: answers.extend([answer]))
    host = urllib.parse.urlparse(origin).netloc
    page.on("request", lambda r: foreign.append(r.url) if host not in r.url[:60] else None)
    page.goto(origin + name.removesuffix("index.html"), wait_until="networkidle")
    weight = {}
    for answer in answers:
        if answer.status >= 400:
            failed.append(f"{answer.url}: {answer.status}")
        elif "search_index" not in answer.url and not answer.url.startswith("data:"):
            weight[answer.url.removeprefix(origin)] = size(answer)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    wide_parts = {}
    for width in PHONES:
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(50)
        wide_parts[width] = page.evaluate(STICKING_OUT, width)
    page.set_viewport_size(WIDE)
    page.wait_for_timeout(50)
    cut_off = page.evaluate(CUT_OFF)
    page.evaluate(SIMPLIFY)
    light = violations(page)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    page.wait_for_timeout(300)  # colours fade over
    dark = violations(page, COLOURS)
    foreign = [url for url in foreign if not url.startswith(("data:", "blob:"))]
    return Visit(messages, foreign, failed, weight, light, dark, wide_parts, cut_off)


def size(answer):
    """Return the bytes of an answer as a server that compresses sends it."""
    content = answer.body()
    if re.search(r"\.(woff2|png|gz)$", answer.url):
        return len(content)
    return len(gzip.compress(content, 9))


# Each page


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_in_light(visit, name):
    assert visit(name).light == []


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_in_dark(visit, name):
    assert visit(name).dark == []


@pytest.mark.parametrize("width", PHONES)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_sticks_out_on_a_phone(visit, name, width):
    assert visit(name).wide_parts[width] == []


@pytest.mark.parametrize("name", PAGES)
def test_no_formula_is_cut_off_on_a_wide_screen(visit, name):
    assert visit(name).cut_off == []


@pytest.mark.parametrize("name", PAGES)
def test_the_console_says_nothing(visit, name):
    assert visit(name).messages == []


@pytest.mark.parametrize("name", PAGES)
def test_every_request_stays_at_home_and_is_answered(visit, name):
    assert visit(name).foreign == []
    assert visit(name).failed == []


@pytest.mark.parametrize("name", PAGES)
def test_a_first_visit_is_light(visit, name):
    weight = visit(name).weight
    largest = sorted(weight.items(), key=lambda pair: -pair[1])[:8]
    assert sum(weight.values()) <= LIMIT, f"{sum(weight.values())} bytes, of them {largest}"


# Formulas, figures, schemes


VISIBLE = """
selector => [...document.querySelectorAll(selector)].filter(element => {
  const box = element.getBoundingClientRect();
  return box.width > 2 && box.height > 4;
}).length
"""


@pytest.mark.parametrize("key", SECTIONS)
def test_formulas_and_figures_are_seen_without_javascript(window, origin, key):
    page = window(origin + html_of(key), java_script_enabled=False)
    folded = page.locator("details .katex-html").count()
    shown = page.locator(".katex-html").evaluate_all(
        "all => all.filter(f => f.getBoundingClientRect().height > 4).length"
    )
    assert shown + folded >= len(formulas(key)) > 0 and shown > folded
    assert page.locator("figure svg").first.bounding_box()["height"] > 50
    assert page.locator("details summary").first.is_visible()


def test_formulas_are_drawn_in_their_own_font(window, origin):
    page = window(origin + html_of(SECTIONS[0]))
    page.wait_for_load_state("networkidle")
    loaded = page.evaluate(
        """[...document.fonts].filter(font => font.status === "loaded").map(
          font => `${font.family} ${font.weight} ${font.style}`.replace("normal ", "400 "))"""
    )
    loaded = {name.replace('"', "") for name in loaded}
    for family in ("KaTeX_Main", "Literata", "JetBrains Mono"):
        assert f"{family} 400 normal" in loaded, loaded


def colours_of_a_figure(page):
    """Return the colours of the first words and lines of a figure, and of the paper."""
    return page.evaluate(
        """() => {
          const figure = document.querySelector("figure svg");
          const lines = [...figure.querySelectorAll("path, use")];
          return [
            getComputedStyle(figure.querySelector("text")).fill,
            lines.map(line => getComputedStyle(line).stroke).find(colour => colour !== "none"),
            getComputedStyle(document.body).backgroundColor,
          ];
        }"""
    )


def test_the_switch_of_the_scheme_recolours_the_figures(window, origin):
    page = window(origin + html_of(SECTIONS[0]), color_scheme="light")
    before = colours_of_a_figure(page)
    for _ in range(3):  # system, light, dark
        if page.evaluate("document.body.dataset.mdColorScheme") == "slate":
            break
        page.locator("form[data-md-component=palette] label:visible").click()
        page.wait_for_timeout(100)
    page.wait_for_timeout(400)
    after = colours_of_a_figure(page)
    assert all(one != other for one, other in zip(before, after, strict=True)), (before, after)
    page.reload()
    page.wait_for_timeout(400)
    assert colours_of_a_figure(page) == after, "the choice is not kept"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("key", SECTIONS)
def test_words_in_figures_can_be_read(window, origin, key, scheme):
    page = window(
        origin + html_of(key), color_scheme=scheme, viewport={"width": 390, "height": 800}
    )
    page.wait_for_timeout(300)
    small, pale = [], []
    for words, height, ratio in page.evaluate(FIGURE_WORDS):
        small += [words] if height < 10 else []
        pale += [(words, round(ratio, 1))] if ratio < 4.5 else []
    assert small == [] and pale == []


FIGURE_WORDS = """
() => {
  const rgb = text => text.match(/[0-9.]+/g).map(Number);
  const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [r, g, b] = colour.map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = rgb(getComputedStyle(document.body).backgroundColor).slice(0, 3);
  const words = [...document.querySelectorAll("figure svg text")];
  return words.filter(text => text.textContent.trim()).map(text => {
    const style = getComputedStyle(text);
    const [r, g, b, alpha = 1] = rgb(style.fill);
    const part = alpha * style.opacity * style.fillOpacity;
    const ink = light([r, g, b].map((c, i) => part * c + (1 - part) * paper[i]));
    const matrix = text.getScreenCTM();
    const size = parseFloat(style.fontSize) * Math.hypot(matrix.a, matrix.b);
    const both = [ink + 0.05, light(paper) + 0.05];
    return [text.textContent, size, Math.max(...both) / Math.min(...both)];
  });
}
"""


# Using it


def test_the_copy_button_gives_the_listing_and_nothing_else(window, origin):
    page = window(origin + html_of(SECTIONS[0]), permissions=["clipboard-read", "clipboard-write"])
    shown = [cell.source for cell in cells(SECTIONS[0]) if cell.options.get("echo", True)]
    blocks = page.locator("article > .highlight")
    for number in range(3):
        blocks.nth(number).hover()
        blocks.nth(number).locator("button[data-md-type=copy], .md-code__button").first.click()
        page.wait_for_timeout(100)
        copied = page.evaluate("navigator.clipboard.readText()")
        compile(copied, "copied", "exec")
        assert copied.strip() in shown


def test_the_next_page_comes_without_a_reload_and_is_whole(window, origin):
    if len(SECTIONS) < 2:
        pytest.fail("there is no second section")
    page = window(origin + html_of(SECTIONS[0]))
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.wait_for_load_state("networkidle")
    page.evaluate("window.stayed = true")
    link = page.locator("a.md-footer__link--next")
    link.scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # as long as a hand takes
    link.click()
    page.wait_for_url(f"**/{SECTIONS[1]}/**")
    page.wait_for_function("document.querySelector('h1').textContent.startsWith('2')")
    page.wait_for_timeout(300)
    assert page.evaluate("scrollY") == 0
    assert page.evaluate("window.stayed"), "the page was loaded anew"
    folded = page.locator("details .katex-html").count()
    assert page.evaluate(VISIBLE, ".katex-html") >= len(formulas(SECTIONS[1])) - folded > 0
    assert page.evaluate(VISIBLE, "figure svg") == page.locator("figure svg").count() > 0
    assert page.locator("a[download]").count() == 2
    assert messages == []


def test_a_reference_leads_to_its_figure(window, origin):
    page = window(origin + html_of(SECTIONS[0]))
    link = page.locator("a.book-ref[href*='#fig-']").first
    name = link.get_attribute("href").partition("#")[2]
    link.click()
    page.wait_for_timeout(300)
    assert page.url.endswith(f"#{name}")
    top = page.locator(f"#{name}").bounding_box()["y"]
    assert -5 <= top < WIDE["height"] / 2, "the figure is not in sight"


def test_the_search_finds_a_section_by_its_words(window, origin):
    page = window(origin)
    page.keyboard.press("/")
    page.keyboard.type("watson")  # which follows a dash, in Nadaraya–Watson
    result = page.locator(f".md-search-result__link[href*='{SECTIONS[1]}/?h=watson']").first
    result.wait_for(timeout=10_000)
    result.click()
    page.wait_for_url(f"**/{SECTIONS[1]}/**")
    page.locator("article mark:visible").first.wait_for(timeout=5_000)


def test_the_keyboard_reaches_and_opens_what_is_folded(window, origin):
    page = window(origin + html_of(SECTIONS[0]))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.md-skip')")
    page.keyboard.press("Enter")
    for _ in range(120):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    else:
        pytest.fail("no folded part was reached")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "one does not see where the keyboard is"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open")


def test_print_opens_what_is_folded_and_is_light(window, origin):
    page = window(origin + html_of(SECTIONS[0]), color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_timeout(300)
    text, _, paper = colours_of_a_figure(page)
    light = [sum(map(float, re.findall(r"[\d.]+", colour)[:3])) for colour in (text, paper)]
    assert light[0] < 300, "figures are not printed by day"
    assert page.locator("details.book-check code").first.is_visible()


def test_the_site_can_be_read_from_a_disk(browser, tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--no-directory-urls"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    context = browser.new_context(viewport=WIDE, offline=True)
    page = context.new_page()
    failed = []
    page.on("requestfailed", lambda request: failed.append(request.url))
    for key in SECTIONS:
        page.goto(f"file://{tmp_path}/{key}.html")
        page.wait_for_timeout(200)
        assert page.evaluate(VISIBLE, ".katex-html") > 0
        assert page.evaluate(VISIBLE, "figure svg") > 0
        loaded = page.evaluate("[...document.fonts].filter(f => f.status == 'loaded').length")
        assert loaded >= 2
    page.locator("a.md-footer__link--prev").click()
    page.wait_for_url(f"**/{SECTIONS[-2]}.html")
    context.close()
    assert [url for url in failed if not url.endswith(("search_index.json", "sitemap.xml"))] == []
