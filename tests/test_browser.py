"""Pages in a real browser, over a real store: one that has ended, and one that goes on meanwhile.

Screenshots of what is looked at go to GRADNORM_SCREENSHOTS (build/screenshots if unset).
"""

import os
import shutil
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from study.traces import TraceWriter

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no chromium; run: sudo apt-get install chromium"),
]
# Shared memory is scarce in containers, and Ray takes what there is.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCREENSHOTS = Path(os.environ.get("GRADNORM_SCREENSHOTS", "build/screenshots"))
PATIENCE = 60_000  # milliseconds: the machine may be busy


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A store with a run of seeds of which one diverges, a long one with spikes, and one that goes on."""
    from conftest import TinyStore

    store = TinyStore(tmp_path_factory.mktemp("browser") / "runs")
    random = np.random.default_rng(0)
    norms = np.exp(0.1 * random.standard_normal(300))
    norms[200:] *= np.linspace(1, 30, 100)
    norms[240:] = np.nan
    broken = {(1, 1): {"step": np.arange(1, 246), "grad_norm": norms, "loss": norms}}
    store.add_run("seeds", steps=300, seeds=3, traces=broken, notes=["alpha changes nothing in fp32"])
    long = np.exp(0.1 * random.standard_normal(20_000))
    long[10_500] = 60.0
    store.add_run(
        "long", steps=20_000, arms=2, traces={(0, 0): {"step": np.arange(1, 20_001), "grad_norm": long}}
    )
    ids = store.add_run("live", steps=100, arms=2, status="running")
    store.change("live", trials={trial: {"num_steps": 1000} for trial in ids})
    return store


@pytest.fixture(scope="module")
def address(planted):
    """The service at work on a port of this machine."""
    import uvicorn

    import service.plots  # noqa: F401 - what the first chart would wait for
    from service.app import create_app
    from service.settings import Settings

    settings = Settings(storage=str(planted.folder), log_level="error", event_seconds=0.2, read_timeout=60)
    config = uvicorn.Config(create_app(settings), port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(browser):
    """A window of given settings, whose cache serves all tests: plotly is read once."""
    known = {}

    def found(**settings):
        key = repr(settings)
        if key not in known:
            known[key] = browser.new_context(**({"viewport": {"width": 1200, "height": 860}} | settings))
        return known[key]

    yield found
    for context in known.values():
        context.close()


@pytest.fixture
def open_page(window, address):
    """Opens a path and waits for its chart; no console error and no request to another host is forgiven."""
    pages = []

    def opened(path, **settings):
        page = window(**settings).new_page()
        pages.append(page)
        page.set_default_timeout(PATIENCE)
        page.asked, page.wrong = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: message.type == "error" and page.wrong.append(message.text))
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.goto(address + path)
        if page.locator("#figure").count():
            page.locator(".legend button").first.wait_for()
        return page

    yield opened
    wrong = [text for page in pages for text in page.wrong]
    foreign = [url for page in pages for url in page.asked if not url.startswith((address, "data:", "blob:"))]
    for page in pages:
        page.close()
    assert wrong == []
    assert foreign == []


def control(page, name):
    return page.locator(f"#figure [name={name}]")


def keep(page, name):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    until(page, "!document.querySelector('.figure.busy')")
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def until(page, script):
    """Waits for an expression to hold; Playwright's own wait evaluates in the page, which that forbids."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(script):
        assert time.monotonic() < deadline, f"still not: {script}"
        page.wait_for_timeout(50)


def query_of(url):
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


def lines(page):
    """What plotly has drawn: name, whether visible, number of points, for each line of values."""
    return page.evaluate("""() => document.querySelector('.plot').data
        .filter((trace) => trace.mode.includes('lines') && !trace.fill && trace.yaxis !== 'y2')
        .map((trace) => [trace.name, trace.visible, trace.x.length])""")


def test_from_the_list_to_a_run(open_page):
    page = open_page("/")
    page.locator("#row-seeds img").scroll_into_view_if_needed()
    until(page, "[...document.querySelectorAll('td img')].every((image) => image.naturalWidth > 0)")
    keep(page, "list")
    page.get_by_role("link", name="seeds", exact=True).click()
    page.locator(".legend button").first.wait_for()
    assert page.title().startswith("seeds")
    assert len(lines(page)) == 4
    assert "diverged: seed 1 at step 241" in page.locator(".legend").inner_text()
    marks = page.evaluate(
        "document.querySelector('.plot').data.filter((trace) => trace.marker?.symbol === 'x').length"
    )
    assert marks >= 1
    assert "alpha changes nothing" in page.locator(".note").inner_text()
    keep(page, "run")


def test_lines_are_toggled_by_mouse_and_by_keyboard(open_page):
    page = open_page("/ui/runs/seeds")
    button = page.locator(".legend button").nth(1)
    button.click()
    assert [visible for _, visible, _ in lines(page)] == [True, False, True, True]
    assert button.get_attribute("aria-pressed") == "false"
    assert query_of(page.url)["hide"] == "1"
    trials = query_of(page.locator("a.picture[data-kind=png]").get_attribute("href"))["trials"]
    assert "seeds_00003" not in trials.split(",")
    button.focus()
    page.keyboard.press("Enter")
    assert all(visible for _, visible, _ in lines(page))
    button.dblclick()
    assert [visible for _, visible, _ in lines(page)] == [False, True, False, False]
    page.get_by_role("button", name="Show all").click()
    assert "hide" not in query_of(page.url)
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def test_zooming_fetches_finer_points(open_page):
    page = open_page("/ui/runs/long")
    assert "more than there are pixels" in page.locator(".sampled").inner_text()
    box = page.locator(".plot .nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    with page.expect_response(lambda answer: "/curves?" in answer.url and "from=" in answer.url) as finer:
        page.mouse.move(box["x"] + box["width"] * 0.5, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.53, middle, steps=4)
        page.mouse.up()
    asked = query_of(finer.value.url)
    first, last = int(asked["from"]), int(asked["to"])
    assert 9_000 < first < 10_501 < last < 12_000
    until(page, "document.querySelector('.sampled').textContent.startsWith('Every step')")
    assert [points for _, _, points in lines(page)] == [last - first + 1] * 2
    highest = page.evaluate("Math.max(...document.querySelector('.plot').data[0].y)")
    assert highest == 60
    assert query_of(page.url)["from"] == asked["from"]
    assert f"from={first}" in page.locator("a.picture[data-kind=svg]").get_attribute("href")
    keep(page, "zoom")
    page.get_by_role("button", name="Whole range").click()
    until(page, "document.querySelector('.plot').data[0].x.at(-1) === 20000")


def test_controls_draw_what_they_say_or_tell_why_not(open_page):
    page = open_page("/ui/runs/seeds?yscale=log")
    assert page.evaluate("document.querySelector('.plot').layout.yaxis.type") == "log"
    control(page, "yscale").select_option("symlog")
    until(page, "document.querySelector('.plot').layout.yaxis.type === 'linear'")
    control(page, "smooth").fill("20")
    page.keyboard.press("Tab")
    until(page, "document.querySelector('.plot').data.some((trace) => trace.line?.width === 2.2)")
    assert len(lines(page)) == 8  # the raw lines stay under the smooth ones
    control(page, "smooth").fill("0")
    control(page, "band").select_option("none")
    until(page, "document.querySelector('.plot').data.every((trace) => !trace.fill)")
    until(page, "new URLSearchParams(location.search).get('smooth') === null")
    assert page.locator(".legend li").count() == 5  # four arms, and what shows all
    control(page, "metric").select_option("pareto")
    until(page, "document.querySelector('.drawn').naturalWidth > 0")
    assert query_of(page.url) == {"yscale": "symlog", "band": "none", "metric": "pareto"}
    control(page, "metric").select_option("loss")
    page.get_by_text("Range and filter").click()
    control(page, "from").fill("50")
    control(page, "to").fill("20")
    page.keyboard.press("Tab")
    page.get_by_text("from 50 is after to 20").wait_for()
    assert all("422" in text for text in page.wrong)
    page.wrong.clear()


def test_trials_sort_and_filter(open_page):
    page = open_page("/ui/runs/seeds")
    heads = page.locator("#trials thead")
    heads.get_by_role("link", name="Seed").click()
    heads.get_by_role("link", name="Seed").click()
    seeds = page.locator("#trial-rows tr td:nth-child(3)").all_inner_texts()
    assert seeds == ["2"] * 4 + ["1"] * 4 + ["0"] * 4
    assert page.locator("#trials th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.get_by_label("Filter").fill("deepnorm")
    assert page.locator("#trial-rows tr:visible").count() == 3
    page.get_by_label("Filter").fill("diverged")
    page.locator("#trial-rows tr:visible a").first.click()
    page.locator(".legend button").first.wait_for()
    assert "Diverged at step 241" in page.locator("#head").inner_text()
    keep(page, "trial")


def test_a_live_run_grows_without_a_reload(open_page, planted):
    trials = ("live_00000", "live_00001")
    page = open_page("/ui/runs/live")
    page.evaluate("window.stayed = true")
    assert lines(page)[0][2] == 100

    def go_on():
        """What workers and the driver do at a flush."""
        for trial in trials:
            writer = TraceWriter(planted.storage, "live", trial, after=100)
            writer.append({"step": np.arange(101, 161), "grad_norm": np.full(60, 2.5), "loss": np.ones(60)})
        now = time.time()
        planted.change("live", {"heartbeat": now}, dict.fromkeys(trials, {"step": 160, "heartbeat": now}))

    worker = threading.Thread(target=go_on)
    worker.start()
    worker.join()
    until(page, "document.querySelector('.plot').data[0].x.at(-1) === 160")
    until(page, "document.querySelector('#trial-rows').textContent.includes('160')")
    assert "16" in page.locator("#head .progress").inner_text()
    keep(page, "live")
    control(page, "view").last.check(force=True)
    until(page, "document.querySelector('.drawn').naturalWidth > 0")
    ended = {"status": "finished", "ended_at": time.time()}
    planted.change("live", ended, dict.fromkeys(trials, ended))
    page.locator("#head .status.finished").wait_for()
    assert page.evaluate("window.stayed")


def test_runs_are_compared_by_their_boxes(open_page):
    page = open_page("/")
    page.get_by_label("Compare seeds").check()
    page.get_by_label("Compare long").check()
    page.get_by_role("button", name="Compare the selected").click()
    page.locator(".legend button").first.wait_for()
    assert len(lines(page)) == 6
    control(page, "metric").select_option("loss")
    until(page, "document.querySelector('.plot').layout.yaxis.title.text === 'Loss'")
    keep(page, "compare")
    again = open_page("/" + page.url.split("/", maxsplit=3)[3])
    assert again.evaluate("document.querySelector('.plot').layout.yaxis.title.text") == "Loss"
    assert lines(again) == lines(page)


def test_the_dark_theme_is_remembered(open_page):
    page = open_page("/ui/runs/seeds", color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(ground) == "rgb(20, 24, 29)"
    page.reload()
    page.locator(".legend button").first.wait_for()
    assert page.evaluate(ground) == "rgb(20, 24, 29)"
    keep(page, "dark")
    page.evaluate("localStorage.clear()")


@pytest.mark.parametrize(
    "path", ["/", "/ui/runs/seeds", "/ui/runs/seeds_00004", "/ui/compare?runs=seeds,long"]
)
def test_pages_fit_a_phone(open_page, path):
    page = open_page(path, is_mobile=True, has_touch=True, viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    small = page.evaluate("""() => [...document.querySelectorAll('main :is(button, select, .button)')]
        .filter((one) => one.checkVisibility())
        .map((one) => one.getBoundingClientRect().height).filter((height) => height < 24)""")
    assert small == []
    keep(page, "phone-" + (path.strip("/").partition("?")[0].replace("/", "-") or "list"))


FAINT_TEXTS = """() => {
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const weights = [0.2126, 0.7152, 0.0722];
    const light = (color) => weights.reduce((sum, weight, i) => sum + weight * linear(color[i] / 255), 0);
    const ground = (one) => {
        for (; one; one = one.parentElement) {
            const color = numbers(getComputedStyle(one).backgroundColor);
            if (color.length < 4 || color[3] > 0) return color;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const one of document.querySelectorAll('body *:not(.plot *, script, noscript, option)')) {
        const text = [...one.childNodes].some((node) => node.nodeType === 3 && node.nodeValue.trim());
        if (!text || !one.checkVisibility()) continue;
        const both = [light(numbers(getComputedStyle(one).color)), light(ground(one))];
        const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        if (contrast < 4.5) found.push([one.textContent.trim().slice(0, 40), contrast]);
    }
    return found;
}"""


def test_text_is_readable_on_its_ground(open_page):
    """WCAG AA: 4.5 to 1, for every text that is in sight, whatever is under it."""
    page = open_page("/ui/runs/seeds", color_scheme="light")
    assert page.evaluate(FAINT_TEXTS) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert page.evaluate(FAINT_TEXTS) == []


def test_everything_is_reached_by_tab_and_seen(open_page):
    page = open_page("/ui/runs/seeds")
    reached, unseen = set(), []
    for _ in range(24):
        page.keyboard.press("Tab")
        name, seen = page.evaluate("""() => {
            const one = document.activeElement;
            const outlined = one.matches('.choice input') ? one.nextElementSibling : one;
            const name = one.id || one.name || one.textContent.trim().slice(0, 30);
            return [name, getComputedStyle(outlined).outlineStyle !== 'none'];
        }""")
        reached.add(name)
        if not seen:
            unseen.append(name)
    assert unseen == []
    assert {"theme", "metric", "group_by", "band", "yscale", "x", "smooth", "view"} <= reached
    assert any(name.startswith("Pre-Norm") for name in reached)
