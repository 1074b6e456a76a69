"""The page of `hvdrun --dashboard` in a browser without a window, Debian's Chromium."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from dashboards import LOOPBACK, TOKEN, Served, serve, snapshot
from launching import wait_until
from rank_samples import NOW, pending, sample, stepped

from sirtaki.runner.observe.state_shape import RankSample
from sirtaki.runner.top.snapshot import Snapshot

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
STARTS, LOOKS = 3, 3
STRANGE = "<img src=x onerror=alert(1)>"
NARROW, WIDE = 360, 1440
pytestmark = pytest.mark.xdist_group("browser")  # one browser for all of them


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} (on Debian: apt install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = start(webdriver, options)
    yield driver
    driver.quit()


def start(webdriver: Any, options: Any) -> Any:
    """Starts the browser. Skips if its driver is of another version.

    Tries again: another process may take the port that selenium has chosen for the driver.
    """
    from selenium.common.exceptions import WebDriverException

    for _ in range(STARTS):
        try:  # with the path of a driver, selenium looks for no other one, and downloads none
            return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        except WebDriverException as error:
            failure = str(error)
        if "only supports Chrome version" in failure:
            pytest.skip(f"chromedriver does not fit chromium: {failure}")
    return pytest.fail(f"the browser does not start: {failure}")


def states_of(size: int, look: int) -> list[RankSample]:
    """Returns states of ranks that wait for rank 1; many of them train. A tensor and a host have strange
    names.
    """
    at: dict[str, Any] = {"size": size, "time": NOW + look, "operations": 10 * look, "bytes": look << 20}
    if size > 2:
        at["steps"] = stepped(7000 + 4 * look, 1750.0 + look, exposed_seconds=0.25 * look)
    at["tensors"] = [[STRANGE, 4, 0.1 * look, 0.2, 0.1], ["layers.0.weight", 4, 0.05 * look, 0.3, 0.1]]
    at["sent"] = [{"peer_host": "<b>peer</b>", "transport": "tcp", "bytes": look << 20}]
    others = {rank: sample(rank, **at, activity=pending(2.0 + look, name=STRANGE)) for rank in range(size)}
    late = sample(
        1, **at, host="<b>host</b>", late_seconds=0.4 * look, stack=[STRANGE, f"at train.py:{look}"]
    )
    return list((others | {1: late}).values())


@pytest.fixture(params=[2, 64])
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[tuple[Served, int]]:
    """Opens the page of a job of 2 or 64 ranks with a few looks; returns it and their number."""
    size, end = request.param, threading.Event()

    def source() -> Iterator[Snapshot]:
        for look in range(LOOKS):  # few, or a browser without a core would never have shown all of them
            yield snapshot(look, *states_of(size, look))
        end.wait()

    with serve(source) as served:
        browser.get(address_of(served))
        wait_until(lambda: count(browser, "#rows tr") == size, "each rank has a row")
        yield served, size
        browser.get("about:blank")
        end.set()


def address_of(served: Served) -> str:
    return f"http://{LOOPBACK}:{served.port}/?token={TOKEN}"


def count(browser: Any, selector: str) -> int:
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def text_of(browser: Any, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def problems_of(browser: Any) -> list[str]:
    """Returns errors of the page. Those of the network may be a browser's that was too busy to read."""
    log = browser.get_log("browser")
    return [one["message"] for one in log if one["level"] == "SEVERE" and one["source"] != "network"]


def emulate(browser: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_the_page_shows_each_rank_and_names_stay_text(browser: Any, page: tuple[Served, int]) -> None:
    served, size = page
    assert browser.current_url == f"http://{LOOPBACK}:{served.port}/"  # without the token
    assert text_of(browser, "#facts").startswith(f"ranks up{size} of {size}")
    wait_until(lambda: "40%" in text_of(browser, "#rows tr:nth-child(2)"), "rank 1 is late")
    assert "<b>host</b>" in text_of(browser, "#rows tr:nth-child(2)")
    assert f"rank 1 to submit the all-reduce '{STRANGE}'" in text_of(browser, "#stalls")
    assert f"for rank 1 to submit '{STRANGE}'" in text_of(browser, "#rows tr:first-child")
    assert text_of(browser, "#tensors tbody tr:first-child td") == STRANGE
    assert text_of(browser, "#tensors tbody tr:last-child") == "layers.0.weight425.075.025.0"
    assert "<b>host</b> → <b>peer</b>" in text_of(browser, "#links")
    assert count(browser, "img, td[data-column=host] b, #hosts b, .view b") == 0
    trains = size > 2
    assert ("step7008steps/s4.00" in text_of(browser, "#facts")) == trains
    assert count(browser, "#rows td[data-column='ms/step']") == (size if trains else 0)
    served.feed.end()
    wait_until(lambda: "has ended" in text_of(browser, "#connection"), "the page says that the job has ended")
    assert count(browser, "#rows tr") == size  # the last look stays
    assert problems_of(browser) == []


def test_a_rank_shows_its_stack_and_goes_on_to(browser: Any, page: tuple[Served, int]) -> None:
    _, size = page
    wait_until(lambda: count(browser, "#rows details") == 1, "rank 1 has a stack")
    assert count(browser, "#rows details[open]") == 0
    browser.execute_script("document.querySelector('#rows details').open = true")
    wait_until(
        lambda: f"at train.py:{LOOKS - 1}" in text_of(browser, "#rows details"), "the last look is shown"
    )
    assert count(browser, "#rows details[open] code") == 2
    assert STRANGE in text_of(browser, "#rows details code:nth-of-type(1)")
    assert count(browser, "#rows img") == 0
    assert count(browser, "#rows tr") == size


def test_a_button_asks_and_the_answer_is_shown(browser: Any, page: tuple[Served, int]) -> None:
    served, _ = page
    shown = "#recording:not([hidden])"
    assert count(browser, shown) == 0
    wait_until(lambda: count(browser, "#actions button:enabled") == 2, "the page is live")
    browser.execute_script("document.querySelector('#actions button').click()")
    wait_until(lambda: count(browser, shown) == 1, "the answer is shown")
    assert text_of(browser, shown).startswith("no rank has written its state")
    served.feed.end()
    wait_until(lambda: count(browser, "#actions button:disabled") == 2, "the job has ended")
    assert problems_of(browser) == []


def test_the_policy_lets_no_other_script_run(browser: Any, page: tuple[Served, int]) -> None:
    browser.execute_script(
        "window.blocked = [];"
        "document.addEventListener('securitypolicyviolation', (one) => blocked.push(one.effectiveDirective));"
        "const script = document.createElement('script'), button = document.createElement('button');"
        "script.textContent = 'window.hasRun = true';"
        "button.setAttribute('onclick', 'window.hasRun = true');"
        "document.body.append(script, button); button.click();"
    )
    blocked = ["script-src-attr", "script-src-elem"]
    wait_until(lambda: sorted(browser.execute_script("return blocked")) == blocked, "both are blocked")
    assert browser.execute_script("return window.hasRun") is None


def test_the_page_says_when_looks_stop_without_an_error(browser: Any) -> None:
    end, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[Snapshot]:
        yield snapshot(0, sample())
        go_on.wait()
        yield snapshot(1, sample(time=NOW + 1))
        end.wait()

    with serve(source) as served:
        browser.get(address_of(served))
        wait_until(lambda: count(browser, "#rows tr") == 1, "the page has a look")
        browser.execute_script("const now = performance.now() + 60000; performance.now = () => now;")
        wait_until(lambda: "no look since" in text_of(browser, "#connection"), "the page is not live")
        assert browser.title == "not live – sirtaki-x"
        go_on.set()
        wait_until(lambda: text_of(browser, "#connection") == "live", "the page is live again")
        assert browser.title == "1/3 ranks – sirtaki-x"
        browser.get("about:blank")
        end.set()


def test_the_page_fits_into_narrow_and_dark_windows(browser: Any, page: tuple[Served, int]) -> None:
    grounds = set()
    for width, scheme in itertools.product((NARROW, 700, WIDE), ("light", "dark")):
        emulate(browser, width, scheme)
        content, window = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert content <= window, (width, scheme)
        grounds.add(
            (scheme, browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        )
    assert len(grounds) == len({ground for _, ground in grounds}) == 2


def test_the_page_says_that_ranks_are_elsewhere(browser: Any) -> None:
    elastic = {"generation": 2, "last_change": "rank 2 was lost"}
    with serve(lambda: iter([snapshot(0, sample(**elastic), sample(1, **elastic))])) as served:
        browser.get(address_of(served))
        wait_until(lambda: count(browser, "#rows tr") == 2, "each rank of this host has a row")
        notices = text_of(browser, "#notices")
        assert "Last change, generation 2: rank 2 was lost" in notices
        assert "1 of 3 ranks have written nothing yet" in notices
        browser.get("about:blank")
