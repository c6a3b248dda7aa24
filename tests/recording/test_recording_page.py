# SPDX-License-Identifier: Apache-2.0
"""Tests of the data of a record's HTML page, and of what a browser makes of them.

The first part decodes the columns in the page and compares them with the record. The
second drives Chromium, moves the mouse, and reads texts and numbers from the page.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import CHROMIUM, DRAWN, FRAME, Browser
from support.records import MIB, by_hand, event, log_of, random_log

from cumem.base.colours import KIND_COLOURS
from cumem.recording import page
from cumem.recording.events import KINDS, OPS, Frame, Log
from cumem.recording.pairing import pair

# The page and its script are the same for each version of Python.
pytestmark = pytest.mark.any_python


def decoded(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the columns of a page, as its script reads them."""
    found = re.search(r'id="header">(.*?)</script>', text, re.S)
    packed = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found
    assert packed
    header = json.loads(found[1])
    data = zlib.decompress(base64.b64decode(packed[1]))
    columns, offset = {}, 0
    for name, dtype, count in header["columns"]:
        columns[name] = np.frombuffer(data, "<" + dtype, count, offset)
        # The typed arrays of JavaScript demand this alignment.
        assert offset % columns[name].itemsize == 0
        offset += -(-columns[name].nbytes // 8) * 8
    assert offset == len(data)
    return header, columns


def totals(columns: dict[str, Any], registered: bool = True) -> Any:
    """Return the bytes that live after each change.

    With `registered=False`, pages that belong to others and were only page-locked do
    not count.
    """
    life, ends = columns["change_of"] // 2, columns["change_of"] % 2
    nbytes = columns["life_nbytes"][life].astype(np.int64)
    kind = columns["site_kind"][columns["life_site"][life]]
    nbytes[(kind == KINDS.index("registered")) & (not registered)] = 0
    return np.where(ends, -nbytes, nbytes).cumsum()


def test_data_of_a_record_worked_out_by_hand() -> None:
    header, columns = decoded(page.render(by_hand()))
    assert header["machine"] == "cumem emulated device"
    assert header["emulated"] is True
    assert columns["change_time"].cumsum().tolist() == [
        0,
        20_000,
        30_000,
        50_000,
        60_000,
    ]
    assert (totals(columns) // MIB).tolist() == [1, 3, 6, 4, 3]
    kinds = columns["site_kind"][columns["life_site"]]
    assert [header["kinds"][kind] for kind in kinds] == ["device", "device", "pinned"]
    assert columns["life_asked"].tolist() == [MIB, 2 * MIB, 5 * MIB // 2]
    stack = header["stacks"][columns["site_stack"][columns["life_site"][2]]]
    frames = [header["frames"][number] for number in stack]
    texts = header["texts"]
    assert [(texts[f], n, texts[g]) for f, n, g in frames] == [
        ("loader.py", 7, "read"),
        ("train.py", 41, "main"),
    ]
    assert columns["transfer_time"].cumsum().tolist() == [40_000, 42_000]
    assert columns["transfer_lane"].tolist() == [0, 1]
    moments = [header["ops"][op] for op in columns["moment_op"]]
    assert moments == ["grow", "out of memory", "trim"]


def test_data_of_a_large_record_are_those_of_the_record() -> None:
    log = random_log(20_000, seed=2)
    header, columns = decoded(page.render(log))
    lives = pair(log)
    begun = lives.rows[lives.begin]
    for name in ("nbytes", "address", "device", "pool"):
        assert np.array_equal(columns[f"life_{name}"], begun[name].astype(np.int64))
    threads = np.array(header["threads"])[columns["life_thread"]]
    assert {int(re.search(r"\((\d+)\)", each)[1]) for each in threads} == set(
        begun["thread"].tolist()
    )
    stacks = np.array(log.stacks, object)[begun["stack"]]
    for site, stack in zip(columns["life_site"][:200], stacks, strict=False):
        numbers = header["stacks"][columns["site_stack"][site]]
        lines = [header["frames"][number][1] for number in numbers]
        assert lines == [frame.lineno for frame in stack]
    at_end = begun["nbytes"][lives.end == len(lives.rows)].sum()
    assert totals(columns)[-1] == at_end > 0
    moved = log.events[log.events["op"] == OPS.index("transfer")]
    assert np.array_equal(columns["transfer_time"].cumsum(), moved["time_ns"])
    assert np.array_equal(columns["transfer_value"], moved["value"])


def test_columns_take_the_smallest_type_that_holds_them() -> None:
    log = log_of(event("allocate", "pinned", 2**33, address=2**47, nbytes=2**40))
    header, columns = decoded(page.render(log))
    types = {name: dtype for name, dtype, _ in header["columns"]}
    assert (types["life_address"], types["life_device"]) == ("f8", "i1")
    assert (types["life_stream"], types["change_time"]) == ("u1", "f8")
    assert columns["life_address"].tolist() == [2**47]


def test_lanes_of_a_direction_are_at_most_so_many() -> None:
    log = log_of(*(event("transfer", "device", i, value=10**6) for i in range(50)))
    _, columns = decoded(page.render(log))
    assert columns["transfer_lane"].max() == page.MOST_LANES - 1


def test_page_asks_for_nothing_from_outside() -> None:
    text = page.render(by_hand())
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", text)
    assert "default-src 'none'" in text


def hostile() -> Log:
    """Return a record whose names would be HTML tags if the page did not escape them."""
    bad = "</script><img src=x onerror=alert(1)>"
    log = by_hand()
    return log._replace(
        tags=("", bad, "loader/decode"),
        stacks=[(), *log.stacks[1:2], (Frame(bad, 7, bad),)],
        threads={1: bad},
        machine={"backend": "cuda", "devices": [bad]},
    )


def test_names_cannot_end_the_script() -> None:
    text = page.render(hostile())
    assert text.count("</script>") == page.render(by_hand()).count("</script>")
    assert decoded(text)[0]["tags"][1].startswith("</script>")


# -- in a browser ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("this machine has no Chromium")
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def shown(browser: Browser, log: Log, folder: Path) -> Browser:
    """Write the page of a log, open it in the browser, and wait until it is drawn."""
    page.write(log, folder / "page.html")
    browser.open(folder / "page.html")
    browser.evaluate(DRAWN)
    return browser


def text(browser: Browser, selector: str) -> str:
    found = f"document.querySelector({json.dumps(selector)})"
    return str(browser.evaluate(f"{found}.innerText"))


def place(browser: Browser, time_ns: int, y: str) -> tuple[float, float]:
    """Return the window's coordinates of a moment on the timeline."""
    box = "$('view').getBoundingClientRect()"
    return (
        browser.evaluate(f"{box}.left + placeOf({time_ns})"),
        browser.evaluate(f"{box}.top + {y}"),
    )


def test_browser_shows_a_record_worked_out_by_hand(browser, tmp_path) -> None:
    shown(browser, by_hand(), tmp_path)
    assert browser.evaluate("document.title") == "cumem record: cumem emulated device"
    assert "emulated" in text(browser, ".badge")
    facts = text(browser, "#facts")
    assert "6 MiB, at 30.000 µs" in facts
    assert "3 MiB in 1" in facts
    assert "2, 4 MiB, 524 GB/s each" in facts
    assert text(browser, "#warnings") == ""
    assert text(browser, "#when").startswith("When most lived, at 30.")
    rows = text(browser, "#rows").split("\n")
    assert rows[0].split("\t") == [
        "3 MiB",
        "50.0 %",
        "",
        "1",
        "pinned",
        "loader.py:7 read",
    ]
    assert rows[1].split("\t") == [
        "2 MiB",
        "33.3 %",
        "",
        "1",
        "device",
        "train.py:12 step",
    ]
    assert browser.complaints() == []


def test_browser_shows_what_is_under_the_pointer(browser, tmp_path) -> None:
    shown(browser, by_hand(), tmp_path)

    def tip(time_ns: int, y: str) -> str:
        browser.mouse("mouseMoved", *place(browser, time_ns, y))
        browser.evaluate(FRAME)
        return (
            text(browser, "#tip")
            if browser.evaluate("$('tip').style.visibility") == "visible"
            else ""
        )

    low = tip(40_000, "AXIS + MEMORY - 5")
    assert "6 MiB live" in low
    assert "pinned: 3 MiB" in low
    assert "loader.py:7 read\ntrain.py:41 main" in low
    assert text(browser, "#when").startswith("Under the pointer")
    above = tip(55_000, "AXIS + 3")
    assert "freed 2 MiB device" in above
    assert "lived 30.0 µs" in above
    assert "train.py:12 step" in above
    lane = tip(41_000, "layout.ways[0].lanes + 2")
    assert "2 MiB pinned to device in 4.00 µs: 524 GB/s" in lane
    assert "tag loader/decode" in lane
    assert tip(46_500, "layout.ways[0].lanes + 2") == ""
    assert "1.05 TB/s" in tip(43_000, "layout.ways[0].rate + 9")
    assert "8 MiB reserved then" in tip(70_000, "layout.strip + 8")
    assert tip(5_000, "layout.strip + 8") == ""
    assert browser.complaints() == []


def test_browser_zooms_moves_and_stacks_by_tag(browser, tmp_path) -> None:
    log = random_log(30_000)
    shown(browser, log, tmp_path)
    _, columns = decoded((tmp_path / "page.html").read_text())
    all_of_it = browser.evaluate("view.end - view.begin")
    x, y = place(browser, log.duration_ns // 3, "AXIS + 50")
    for _ in range(5):
        browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    browser.evaluate(FRAME)
    assert browser.evaluate("view.end - view.begin") == pytest.approx(
        all_of_it * np.exp(-2), rel=1e-6
    )
    # The moment under the pointer stays there while the page zooms.
    assert place(browser, log.duration_ns // 3, "0")[0] == pytest.approx(x, abs=1)
    begin = browser.evaluate("view.begin")
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    assert browser.evaluate("view.begin - 100 * pixel()") == pytest.approx(begin)
    browser.evaluate("stackBy('tag')")
    browser.evaluate(FRAME)
    assert "loader/decode" in text(browser, "#legend")
    browser.evaluate("goToPeak()")
    browser.evaluate(FRAME)
    assert text(browser, "#when").startswith("At the moment kept")
    assert browser.evaluate("record.total[record.peak]") == totals(columns, False).max()
    browser.evaluate("whole()")
    assert browser.evaluate("view.end - view.begin") == all_of_it
    assert browser.complaints() == []


def test_browser_sums_agree_with_a_plain_loop(browser, tmp_path) -> None:
    """The page keeps maxima of ranges and partial sums by group and by site.

    At any moment, they must agree with a plain loop.
    """
    log = random_log(12_000, seed=7)
    shown(browser, log, tmp_path)
    _, columns = decoded((tmp_path / "page.html").read_text())
    all_, own = totals(columns), totals(columns, False)
    random = np.random.default_rng(0)
    pairs = np.sort(random.integers(0, len(all_), (200, 2)), axis=1)
    pairs[:, 1] += 1
    best = browser.evaluate(
        f"{pairs.tolist()}.map(([a, b]) => record.total[record.highest.of(a, b)])"
    )
    assert best == [int(own[a:b].max()) for a, b in pairs]
    for index in (-1, 0, 63, 64, 4095, len(all_) - 1):
        for by in ("record.by.kind.sums", "record.by.tag.sums", "record.siteBytes"):
            now = f"{by}.at({index}, new Float64Array({by}.count))"
            assert browser.evaluate(f"{now}.reduce((a, b) => a + b, 0)") == (
                int(all_[index]) if index >= 0 else 0
            )


def test_browser_adds_up_the_rates_of_all_lanes(browser, tmp_path) -> None:
    """The page draws only a few lanes for each direction of transfers. The rate of a
    direction must nevertheless count all its transfers, each at its own time.
    """
    each = {"value": 10**6, "nbytes": MIB}
    log = log_of(*(event("transfer", "device", 0, **each) for _ in range(50)))
    shown(browser, log._replace(duration_ns=2 * 10**6), tmp_path)
    moved = browser.evaluate("[...layout.ways[0].moved]")
    assert sum(moved) == pytest.approx(50 * MIB)
    rate = 50 * MIB / 1e6 * browser.evaluate("pixel()")
    half = len(moved) // 2
    assert moved[1 : half - 1] == pytest.approx([rate] * (half - 2))
    assert moved[half + 1 :] == pytest.approx([0] * (len(moved) - half - 1), abs=1e-3)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_browser_draws_in_the_theme_that_is_preferred(browser, tmp_path, theme) -> None:
    browser.theme(theme)
    shown(browser, by_hand(), tmp_path)
    assert browser.evaluate("document.documentElement.dataset.theme") == theme
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (theme == "light")
    inked = "getImageData(placeOf(40e3), AXIS + MEMORY - 9, 1, 1).data"
    drawn = browser.evaluate(f"[...$('main').getContext('2d').{inked}]")
    assert bytes(drawn) == bytes.fromhex(KIND_COLOURS["pinned"][1:] + "ff")


def test_browser_leaves_pages_of_others_out_of_the_total(browser, tmp_path) -> None:
    log = log_of(
        event("allocate", "registered", 10, address=64, nbytes=8 * MIB),
        event("allocate", "device", 20, address=128, nbytes=MIB),
    )
    shown(browser, log, tmp_path)
    facts = text(browser, "#facts")
    assert "1 MiB, at 0.0200 µs" in facts
    assert "1 MiB in 1" in facts
    assert "registered 8 MiB" in text(browser, "#legend")
    assert browser.evaluate("layout.tops.at(-1).at(-1)") == 9 * MIB
    assert browser.complaints() == []


@pytest.mark.parametrize(
    "log",
    [
        log_of(),
        log_of(event("transfer", "device", 0, nbytes=5)),
        log_of(living=[event("allocate", "pinned", 0, address=64, nbytes=64)]),
        log_of(*(event("transfer", "device", i, value=9**6) for i in range(50))),
        hostile(),
    ],
    ids=["nothing", "transfer", "living", "lanes", "hostile"],
)
def test_browser_shows_records_of_little(browser, tmp_path, log) -> None:
    shown(browser, log, tmp_path)
    for y in range(200, 700, 8):
        browser.mouse("mouseMoved", 500, y)
        browser.evaluate("drawPointer()")
    for key in ("ArrowLeft", "+", "p", "0", "Escape"):
        browser.evaluate(
            f"dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))"
        )
    browser.evaluate(FRAME)
    assert text(browser, "#warnings") == ""
    assert browser.evaluate("document.images.length") == 0
    assert browser.complaints() == []


def test_browser_warns_of_what_is_missing(browser, tmp_path) -> None:
    log = log_of(event("free", "pinned", 9, address=64, nbytes=1))
    shown(browser, log._replace(lost_count=1234), tmp_path)
    warnings = text(browser, "#warnings")
    assert "1,234 events did not fit" in warnings
    assert "1 frees of memory that nobody saw allocated" in warnings
