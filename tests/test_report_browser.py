"""The page in a real Chromium: no error, no request, everything there and working, at both widths and in both themes."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_fakes import HOSTILE, every_outcome, fidelity, many, two_runs
from report_page import FIGURES, SECTIONS

from harness.record import Record
from reports.page import render

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install 'locks-bench[dev]'")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver") or shutil.which("chromium-driver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium: apt-get install chromium chromium-driver"),
]
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
NARROW, WIDE = 390, 1920
AXE = "axe-core@4.10.3"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    downloads = tmp_path_factory.mktemp("downloads")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    driver.downloads = downloads
    driver.get("about:blank")  # not the page that Chromium shows for a new tab
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A page by name, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("pages")
    made: dict[str, Callable[[], list[Record]]] = {"every": every_outcome, "two": two_runs, "many": lambda: many(10_000)}

    def page(name: str) -> Path:
        target = folder / f"{name}.html"
        if not target.exists():
            target.write_text(render(made[name](), fidelity=fidelity() if name == "two" else ()), encoding="utf-8")
        return target

    return page


@pytest.fixture
def show(browser: Any, pages: Callable[[str], Path]) -> Iterator[Open]:
    """Open a page and wait until every figure is drawn; afterwards there must be no error and no request."""

    def opened(name: str, address: str = "", width: int = WIDE, scheme: str = "light") -> Any:
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        browser.get("about:blank")
        browser.get(f"{pages(name).as_uri()}{address}")
        drawn(browser)
        return browser

    for log in ("browser", "performance"):
        browser.get_log(log)
    yield opened
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:", "blob:", "about:", "chrome:"))] == []


def drawn(browser: Any) -> None:
    for _ in range(300):
        if browser.execute_script("return document.documentElement.dataset.drawn"):
            return
        time.sleep(0.1)
    raise AssertionError("the figures were not drawn in 30 s")


def requests(browser: Any) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def js(browser: Any, code: str, *values: Any) -> Any:
    return browser.execute_script(f"return {code}", *values)


@pytest.mark.parametrize("name", ["every", "two", "many"])
@pytest.mark.parametrize(("width", "scheme"), [(NARROW, "light"), (NARROW, "dark"), (WIDE, "light"), (WIDE, "dark")])
def test_everything_is_drawn_and_fits(show: Open, name: str, width: int, scheme: str) -> None:
    browser = show(name, width=width, scheme=scheme)
    assert js(browser, "document.documentElement.dataset.theme") == scheme
    assert js(browser, "document.documentElement.scrollWidth") <= width
    for section in SECTIONS:
        assert js(browser, "document.getElementById(arguments[0]).offsetHeight", section) > 40, section
    for figure in FIGURES:
        state = js(
            browser,
            """(() => {
              const one = document.querySelector(`[data-figure=${arguments[0]}]`);
              const plot = one.querySelector(".plot");
              return [Boolean(plot.querySelector(".main-svg")) && plot.data.length, one.querySelector(".absent").textContent];
            })()""",
            figure,
        )
        assert bool(state[0]) != bool(state[1]), (figure, state)
        assert "cannot be drawn" not in state[1]


def test_figures_show_the_numbers_of_the_table(show: Open) -> None:
    browser = show("every", "#latency?panel=nvidia-h200-llama-3.1-8b-level-attention-budget-2k&latency=batch+4")
    records = [record for record in every_outcome() if record.case["batch"] == 4 and record.case["level"] == "attention"]
    data = "document.querySelector('[data-figure=latency] .plot').data"
    contexts, times = js(browser, f"(() => {{ const t = {data}.find((t) => t.name === 'fa3'); return [t.x, t.y]; }})()")
    for ctx, shown in zip(contexts, times, strict=True):
        record = next(record for record in records if record.backend == "fa3" and record.case["ctx"] == ctx)
        assert (shown is not None) == (record.outcome == "OK")
        if shown is not None:
            middles = sorted(sorted(part)[1:3] for part in record.rounds_ns or [])
            values = sorted(sum(middle) / 2 for middle in middles)
            assert shown == pytest.approx((values[5] + values[6]) / 2e3, rel=1e-6)


def test_table_sorts_filters_and_keeps_its_state_in_the_address(show: Open) -> None:
    browser = show("every", "#rows?outcome=OK&backend=fa3&sort=latency_us&order=down")
    column = "[...document.querySelectorAll('table.data tbody tr')].map((tr) => [...tr.cells].map((td) => td.textContent))"
    rows = js(browser, column)
    heads = js(browser, "[...document.querySelectorAll('table.data thead th')].map((th) => th.textContent)")
    times = [float(row[heads.index("latency, µs [95 %]")].split()[0].replace(",", "")) for row in rows]
    wanted = [record for record in every_outcome() if record.backend == "fa3" and record.outcome == "OK"]
    assert len(times) == len(wanted) and times == sorted(times, reverse=True)
    assert js(browser, "document.querySelector('[name=outcome]').value") == "OK"
    assert js(browser, "document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"

    browser.execute_script("document.querySelector('[data-sort=ctx]').click()")
    assert "sort=ctx" in browser.current_url and "backend=fa3" in browser.current_url
    assert js(browser, "document.activeElement.dataset.sort") == "ctx"
    select = "const s = document.querySelector('[name=outcome]'); s.value = 'OOM'; s.dispatchEvent(new Event('change'));"
    browser.execute_script(select)
    assert "outcome=OOM" in browser.current_url
    assert js(browser, "document.querySelector('#rows .shown').textContent").startswith("1 of 60 rows")
    browser.execute_script("document.querySelector('#rows .clear').click()")
    assert js(browser, "document.querySelector('#rows .shown').textContent").startswith("60 of 60 rows")


def test_links_open_a_section_and_keep_what_is_shown(show: Open) -> None:
    browser = show("every", "#stability?latency=batch+1")
    top = js(browser, "document.getElementById('stability').getBoundingClientRect().top")
    assert 0 <= top < 300
    browser.execute_script("document.querySelector('nav a[data-section=rows]').click()")
    assert browser.current_url.endswith("#rows?latency=batch+1")
    browser.execute_script("document.querySelector('a.outcome').click()")
    drawn(browser)
    assert "rows?outcome=CAPTURE_FAILED" in browser.current_url
    assert js(browser, "document.querySelector('#rows .shown').textContent").startswith("1 of 60 rows")


def test_another_set_up_changes_summary_and_figures(show: Open) -> None:
    browser = show("every")
    before = js(browser, "document.querySelector('.of-panel:not([hidden]) .headline').textContent")
    choose = "const s = document.getElementById('panel'); s.selectedIndex = 1; s.dispatchEvent(new Event('change'));"
    browser.execute_script(choose)
    drawn(browser)
    after = js(browser, "document.querySelector('.of-panel:not([hidden]) .headline').textContent")
    assert before != after and "panel=" in browser.current_url
    assert HOSTILE in js(browser, "document.querySelector('[data-figure=latency] .plot').data.map((t) => t.name)")


def test_theme_button_and_print(show: Open) -> None:
    browser = show("two")
    browser.execute_script("document.getElementById('theme').click()")
    assert js(browser, "document.documentElement.dataset.theme") == "dark"
    assert js(browser, "getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    browser.execute_script("document.getElementById('theme').click(); localStorage.removeItem('locks-bench-theme')")
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert len(pdf) > 50_000


def test_record_command_and_csv(show: Open) -> None:
    browser = show("every")
    browser.execute_script("document.querySelector('[data-action=record]').click()")
    for _ in range(50):
        if js(browser, "document.getElementById('record').open"):
            break
        time.sleep(0.1)
    shown = json.loads(js(browser, "document.querySelector('#record pre').textContent"))
    assert shown["key"] == js(browser, "Report.value(0, 'key')")
    browser.execute_script("document.querySelector('.close-record').click()")
    button = browser.find_element("css selector", "[data-action=command]")
    button.click()  # as a person: a script may not write the clipboard
    time.sleep(0.3)
    assert button.text == "copied"
    browser.execute_script("document.querySelector('#rows .csv').click()")
    target = browser.downloads / "locks-bench-rows.csv"
    for _ in range(50):
        if target.exists():
            break
        time.sleep(0.1)
    lines = target.read_text().splitlines()
    assert len(lines) == 61 and lines[0].startswith("key,machine,model")


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker, from npm into a folder that is thrown away."""
    if not shutil.which("npm"):
        pytest.skip("no npm, so there is no accessibility check")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), AXE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not answer, so there is no accessibility check")
    if done.returncode:
        pytest.skip(f"npm cannot install {AXE}, so there is no accessibility check: {done.stderr.strip()[-200:]}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_nothing_serious_stands_in_the_way_of_assistive_technology(show: Open, axe: str, width: int, scheme: str) -> None:
    browser = show("every", width=width, scheme=scheme)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true;")
    browser.execute_script(axe)
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    serious = [
        (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert len(found["passes"]) > 20


def test_the_accessibility_check_sees_what_it_looks_for(show: Open, axe: str) -> None:
    browser = show("two")
    browser.execute_script("document.querySelector('main').append(document.createElement('select'))")
    browser.execute_script(axe)
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    assert "select-name" in {one["id"] for one in found["violations"]}
