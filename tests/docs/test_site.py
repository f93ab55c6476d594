"""The documentation site: it builds without a warning or a network, lists every page, and works in a browser."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import sb3_ppo_ext

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# One process builds once.
pytestmark = pytest.mark.xdist_group("site")


def contents_of(page):
    """What the contents in a page list."""
    blocks = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    return "".join(blocks).splitlines()


def test_every_page_is_listed():
    """The contents list every file of the documentation, at most a dozen of them at first sight."""
    first = contents_of("index")
    assert len(first) <= 12
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages <= {*first, *contents_of("guides"), *contents_of("evidence")}


def test_every_public_name_is_documented():
    """The API reference has all that the package exports."""
    text = (DOCS / "api.md").read_text()
    names = set(sb3_ppo_ext.__all__) - {"__version__"}
    assert not [name for name in names if f":: sb3_ppo_ext.{name}\n" not in text]


def build(source, target):
    """Build a site as `make docs` does, without a network."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", DOCS / "site", source, target]
    environment = {name: value for name, value in os.environ.items() if name != "DOCS_ONLINE"}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the site, built with warnings as errors."""
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.integration
def test_site(site):
    """It has the pages, with the types of parameters, pictures, files that are linked, and no link to a Markdown file."""
    assert "docs/index.html" in (site / "index.html").read_text()
    html = {path: path.read_text() for path in [site / "README.html", *(site / "docs").glob("*.html")]}
    assert len(html) == 1 + len(list(DOCS.glob("*.md")))
    assert not [path for path, text in html.items() if re.search(r'href="[^"]*\.md["#]', text)]
    api = html[site / "docs" / "api.html"]
    assert 'id="sb3_ppo_ext.PPOExt"' in api
    assert "adv_ema_warm_start" in api
    assert (site / "_images" / "action_distributions.svg").exists()
    assert list((site / "_downloads").rglob("ray_tune.py"))


@pytest.mark.slow
@pytest.mark.integration
def test_broken_links_are_errors(tmp_path):
    """A link to a heading, page or picture that does not exist makes the build fail."""
    pytest.importorskip("sphinx")
    broken = ["[x](options.md#no-such-heading)", "[x](no_such_page.md)", "![x](no_such_picture.png)"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "options.md").write_text("# Options\n\n[y](#options)\n")
    (tmp_path / "docs" / "index.md").write_text("\n\n".join(["# Title", *broken, "```{toctree}\noptions\n```\n"]))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert sorted(line.split("index.md:")[1][0] for line in done.stderr.splitlines() if "index.md:" in line) == ["3", "5", "7"]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Address of a server with the site."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium, if there is one."""
    selenium = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    switches = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    switches += " disable-component-update disable-sync disable-dev-shm-usage"
    for switch in switches.split():
        options.add_argument(f"--{switch}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield chromium
    chromium.quit()


def wait_for(condition, seconds=20):
    """The value of a function as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    return condition()


# Words of tables that are broken, and cells whose sentences stand in a narrow column
BROKEN = """
const narrowest = window.innerWidth < 480 ? 95 : 120;  // phones have a smaller font
return [...document.querySelectorAll('article td, article th')].flatMap(cell => {
  const text = cell.textContent.trim();
  const narrow = text.length > 40 && cell.getBoundingClientRect().width < narrowest ? [text] : [];
  const nodes = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), words = [];
  for (let node = nodes.nextNode(); node; node = nodes.nextNode())
    for (const match of node.data.matchAll(/[\\p{L}\\p{N}_]+/gu)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) words.push(match[0]);
    }
  return narrow.concat(words);
})
"""

# Blocks that scroll sideways
CUT_OFF = """
return [...document.querySelectorAll(arguments[0])]
  .filter(block => block.scrollWidth > block.clientWidth + 1).map(block => block.textContent.trim().slice(0, 80))
"""


@pytest.mark.slow
@pytest.mark.integration
def test_pages_load(browser, address):
    """Every page has its title and contents, its pictures are drawn, and nothing is missing, cut off or broken."""
    files = [*ROOT.glob("benchmark/*.md"), *DOCS.glob("*.md")]
    pages = ["README", "CHANGELOG", "CONTRIBUTING", *(str(path.relative_to(ROOT).with_suffix("")) for path in files)]
    for width in (390, 768, 1400):
        emulated = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", emulated)
        for page in pages:
            browser.get(f"{address}/{page}.html")
            assert browser.execute_script("return document.querySelector('article h1').textContent.length") > 3, page
            # Pictures further down are loaded when they are looked at.
            pictures = "return [...document.querySelectorAll('article img')]"
            browser.execute_script(pictures + ".forEach(i => i.loading = 'eager')")
            assert wait_for(partial(browser.execute_script, pictures + ".every(i => i.complete && i.naturalWidth > 0)")), page
            widths = browser.execute_script(pictures + ".map(i => i.getBoundingClientRect().width)")
            assert all(100 < w <= width for w in widths), (page, widths)
            # The page itself does not scroll sideways: tables and code do.
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
            assert not browser.execute_script(BROKEN), page
            # Tables have many columns for a phone, and the trials of the search one for each task.
            has_tables = width == 1400 and page != "benchmark/search"
            blocks = "article pre, article .table-wrapper" if has_tables else "article pre"
            assert not browser.execute_script(CUT_OFF, blocks), page
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    # Browsers ask for this picture, which the site does not have.
    assert not [message for message in errors if "favicon.ico" not in message]


@pytest.mark.slow
@pytest.mark.integration
def test_plots_are_there(browser, address):
    """The benchmark page and the guides show plots, at the width of a phone, too."""
    emulated = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", emulated)
    for page, least in (("benchmark/README", 4), ("docs/studies", 4), ("docs/memory_studies", 2), ("docs/performance", 2)):
        browser.get(f"{address}/{page}.html")
        assert len(browser.find_elements("css selector", "article img")) >= least, page


@pytest.mark.slow
@pytest.mark.integration
def test_search(browser, address):
    """Whoever searches for "beta" finds the page of the options."""
    browser.get(f"{address}/search.html?q=beta")
    found = "return [...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'))"
    assert wait_for(lambda: {"docs/options.html", "docs/api.html"} <= set(browser.execute_script(found)))


@pytest.mark.slow
@pytest.mark.integration
def test_code_is_copied(browser, address):
    """The button of a block copies its code as it stands, which can be pasted elsewhere."""
    from selenium.webdriver import ActionChains, Keys

    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(f"{address}/docs/index.html")
    button = wait_for(lambda: browser.find_elements("css selector", ".highlight-python button.copybtn"))[0]
    ActionChains(browser).move_to_element(button).click(button).perform()
    assert wait_for(lambda: "success" in button.get_attribute("class"))
    browser.execute_script("document.querySelector('article').prepend(document.createElement('textarea'))")
    field = browser.find_element("css selector", "article textarea")
    field.click()
    ActionChains(browser).key_down(Keys.CONTROL).send_keys("v").key_up(Keys.CONTROL).perform()
    code = (DOCS / "index.md").read_text().split("```python\n")[1].split("```")[0]
    assert wait_for(lambda: field.get_property("value")).strip() == code.strip()
