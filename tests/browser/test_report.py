"""The report in a headless Chromium: `OPD_CHROMIUM` names the program, else it is looked for on the path."""

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.report_runs import write_results, write_run
from opd.report.compare import Options, compare, write_page

pytestmark = pytest.mark.browser

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
)
FLAGS += "--disable-sync"
WIDTHS = {"desktop": 1280, "phone": 390}
SMALLEST_PX = 8.5  # of a letter in a figure, on a phone


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    """Five variants x two seeds with two suites and a teacher; names and texts of every kind."""
    folder = tmp_path_factory.mktemp("browser")
    variants = {"sampled": "reverse_kl_sampled", "topk": "reverse_kl", "full": "reverse_kl", "forward": "forward_kl"}
    for place, (name, kl) in enumerate({**variants, "<script>alert(1)<\\script> " + "long-" * 20: "jsd"}.items()):
        for seed in range(2):
            path = folder / "runs" / name / f"seed-{seed}"
            suites, config = {"gsm8k": 4, "math500": 2}, {"note": "x" * 500 + name}
            write_run(path, level=0.6 + 0.07 * place, seed=seed, kl=kl, config=config, suites=suites)
            if name == "topk":
                _drop_advantages(path / "rollouts")
    teacher = write_results(folder / "teacher", {"heldout": 0.97})
    return write_page(compare([folder / "runs"], Options(teacher=teacher)), folder / "out")


def _drop_advantages(folder):
    """As where the sampler's log-probs do not compare with the teacher's."""
    for path in folder.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({key: row[key] for key in row if key != "advantages"}) + "\n" for row in rows))


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright (no browser download is needed)")
    program = os.environ.get("OPD_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "no Chromium: install one, or name it in OPD_CHROMIUM"
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(params=WIDTHS)
def width(request):
    return WIDTHS[request.param]


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture
def page(browser, page_path, width, scheme):
    """The open page; whatever it says on the console or asks of a network fails the test at its end."""
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, device_scale_factor=2)
    opened, said, asked = context.new_page(), [], []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: said.append(dialog.message))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(page_path.as_uri())
    yield opened
    context.close()
    assert said == []
    assert [url for url in asked if url not in {page_path.as_uri(), "data:,"}] == []


def colours(page) -> list[list[float]]:
    """Background and letters of the page, as red, green and blue in 0..255."""
    style = "getComputedStyle(document.body)"
    texts = page.evaluate(f"[{style}.backgroundColor, {style}.color]")
    return [[float(part) for part in text.strip("rgb()").split(",")] for text in texts]


def test_nothing_is_wider_than_the_page(page, width):
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = """[...document.querySelectorAll('body *')].filter(each => !each.closest('.scroll, .hidden, .skip, svg')
              && each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 80))"""
    assert page.evaluate(wide) == []


def test_the_page_is_light_or_dark_as_the_system_is(page, scheme):
    background, letters = colours(page)
    assert (sum(background) > sum(letters)) == (scheme == "light")


def test_figures_are_readable(page):
    """Letters are large enough where the page is narrow; none is cut off by its figure."""
    sizes = page.evaluate(
        """[...document.querySelectorAll('figure > svg')].filter(svg => svg.getBoundingClientRect().width).map(svg => {
             const frame = svg.getBoundingClientRect(), scale = svg.getScreenCTM().a;
             const texts = [...svg.querySelectorAll('text')];
             return {label: svg.getAttribute('aria-label'), texts: texts.length,
                     px: Math.min(...texts.map(text => parseFloat(getComputedStyle(text).fontSize) * scale)),
                     cut: texts.filter(text => { const box = text.getBoundingClientRect();
                       return box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2
                              || box.bottom > frame.bottom + 2; }).map(text => text.textContent)}; })"""
    )
    assert len(sizes) >= 8
    assert [each for each in sizes if each["cut"] or each["px"] < SMALLEST_PX or each["texts"] < 5] == []


def test_the_keyboard_reaches_every_control(page):
    reached = set()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    for _ in range(200):
        place = page.evaluate(
            "document.activeElement.id || document.activeElement.tagName + ' ' + document.activeElement.className"
        )
        reached.add(place)
        page.keyboard.press("Tab")
        if place.startswith("BODY"):
            break
    assert {"theme-automatic", "axis-steps", "show-0", "show-4"} <= reached
    assert {"SUMMARY ", "DIV scroll", "A "} <= reached
    page.focus("#theme-automatic")
    page.keyboard.press("ArrowLeft")
    assert page.is_checked("#theme-dark")
    background, letters = colours(page)
    assert sum(background) < sum(letters)


def test_the_controls_choose_axis_and_groups(page):
    def shown(axis: str) -> int:
        figures = f"[...document.querySelectorAll('.curves [data-axis={axis}]')]"
        return page.evaluate(f"{figures}.filter(each => each.getBoundingClientRect().height).length")

    assert shown("steps") >= 5
    assert shown("tokens") == 0
    page.focus("#axis-steps")
    page.keyboard.press("ArrowRight")
    assert shown("steps") == 0
    assert shown("tokens") >= 5
    lines = (
        "[...document.querySelectorAll('[data-axis=tokens] .group-1')].filter(each => each.getClientRects().length).length"
    )
    before = page.evaluate(lines)
    assert before
    page.focus("#show-1")
    page.keyboard.press("Space")
    assert page.evaluate(lines) == 0


def test_the_focus_is_visible(page):
    page.focus("#show-0")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert float(outline.removesuffix("px")) >= 2


def test_it_prints(page, scheme, tmp_path):
    page.emulate_media(media="print")
    background, letters = colours(page)
    assert sum(background) > sum(letters)  # light on paper, whatever the screen is
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_screenshots(page, width, scheme, tmp_path):
    """For looking at: `OPD_SCREENSHOTS` names a folder to keep them in."""
    folder = Path(os.environ.get("OPD_SCREENSHOTS") or tmp_path)
    picture = folder / f"{width}-{scheme}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 100_000
