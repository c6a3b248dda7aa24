# SPDX-License-Identifier: Apache-2.0
"""Measure how fast the HTML page of a record is in a browser, and take pictures of it.

    python benchmarks/recording_page.py [--record FILE] [--json FILE] [--images FOLDER]

The script needs Chromium, and no GPU. It writes the page of a record that was saved as
.npz, or of one that it makes up to resemble a training loop, and opens it in a headless
Chromium, which draws with the processor. It measures how long the page takes until it is
first drawn, what one frame of zooming or hovering costs, and how much time passes between
frames while wheel and mouse events arrive.

`processor_ms` and the seconds of the exports are processor time, so other work of the
machine does not lengthen them. The other times are by the page's clock. Pictures also need
Pillow.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cumem
from cumem import info
from cumem.recording import json_lines, page, perfetto, pprof, torch_snapshot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.browser import CHROMIUM, DRAWN, FRAME, Browser
from support.records import random_log

WIDTH, HEIGHT = 1200, 900
COUNT = 60  # how many frames of zooming, and of hovering
#: Each frame waits until the one before is drawn. Otherwise its time would include that of
#: the frame before.
FRAMES = """(async () => {
  const rest = () => new Promise(
    done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const costs = [];
  for (let i = 0; i < %d; i++) {
    await rest();
    const begin = performance.now();
    %s
    costs.push(performance.now() - begin);
  }
  whole();
  await rest();
  return costs;
})()"""
ZOOM = """
    if (i % 30 === 0) [view.begin, view.end] = [0, header.duration_ns];
    const tenth = (view.end - view.begin) / 10;
    [view.begin, view.end] = [view.begin + tenth, view.end - tenth];
    draw();
"""
HOVER = "[pointer.x, pointer.y] = [150 + i * 15, 200]; drawPointer();"
WATCH = """(() => {
  window.apart = [];
  let last = performance.now();
  const look = () => {
    apart.push(performance.now() - last);
    last = performance.now();
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})()"""


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the maximum of times in ms."""
    ordered = sorted(values)
    return {
        "median_ms": round(statistics.median(ordered), 2),
        "p95_ms": round(ordered[int(len(ordered) * 0.95)], 2),
        "max_ms": round(ordered[-1], 2),
    }


def busy_ms(browser: Browser) -> float:
    """Return the processor time of the page's main thread since the page was opened."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return 1e3 * next(m["value"] for m in metrics if m["name"] == "TaskDuration")


def frames(browser: Browser, code: str) -> dict[str, float]:
    """Measure frames: the time of their script, and the processor time of all work."""
    before = busy_ms(browser)
    costs = browser.evaluate(FRAMES % (COUNT, code))
    busy = (busy_ms(browser) - before) / COUNT
    return {"processor_ms": round(busy, 2), "script": spread(costs)}


def measure(browser: Browser, path: Path) -> dict[str, Any]:
    """Measure the page while it opens, zooms and hovers as if a person used it."""
    browser.call("Performance.enable", timeDomain="threadTicks")
    drawn, worked = [], []
    for _ in range(3):
        browser.open(path)
        browser.evaluate(DRAWN)
        worked.append(round(busy_ms(browser)))
        drawn.append(
            browser.evaluate("performance.getEntriesByName('drawn')[0].startTime")
        )
    costs = {"zoom": frames(browser, ZOOM), "hover": frames(browser, HOVER)}
    browser.evaluate(WATCH)
    for _ in range(COUNT):
        browser.mouse("mouseWheel", 600, 330, deltaX=0, deltaY=-100)
    for step in range(COUNT):
        browser.mouse("mouseMoved", 200 + 10 * step, 330)
    apart = browser.evaluate("apart")
    complaints = browser.complaints()
    assert not complaints, complaints
    return {
        "first_draw": {"ms": [round(each) for each in drawn], "processor_ms": worked},
        "frame": costs,
        "between_frames": spread(apart[1:]),
    }


def picture(browser: Browser, path: Path, theme: str, by: str, place: str) -> None:
    """Save a picture of the window in 256 colours."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    browser.theme(theme)
    browser.evaluate(f"stackBy('{by}'), {place}")
    browser.evaluate(FRAME)
    browser.mouse("mouseMoved", 520, 340)
    browser.evaluate(FRAME)
    with tempfile.TemporaryDirectory() as folder:
        browser.screenshot(Path(folder) / "all.png")
        with Image.open(Path(folder) / "all.png") as image:
            few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
            few.save(path, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="a saved record to show")
    parser.add_argument(
        "--events",
        type=int,
        default=1_030_000,
        help="without --record: make up so many",
    )
    parser.add_argument(
        "--part", default="9e9, 10.3e9", help="nanoseconds that the pictures show"
    )
    parser.add_argument("--json", type=Path, help="write the results to FILE")
    parser.add_argument("--images", type=Path, help="write pictures to FOLDER")
    options = parser.parse_args()
    if CHROMIUM is None:
        parser.error("it needs Chromium, which is not here")
    started = datetime.now(UTC)
    if options.record:
        log = cumem.Record.load(options.record).log
    else:
        log = random_log(options.events)
    results: dict[str, Any] = {
        "commit": info.commit(),
        "started": started.isoformat(timespec="seconds"),
        **info.collect(),
        "load": os.getloadavg()[0],  # shows whether other programs were busy
        "events": len(log.events),
        "stacks": len(log.stacks),
        "exports": {},
    }
    for module in (page, perfetto, pprof, json_lines, torch_snapshot):
        file, begin = io.BytesIO(), time.process_time()
        module.write(log, file)
        name = module.__name__.rpartition(".")[2]
        took = round(time.process_time() - begin, 2)
        results["exports"][name] = {"seconds": took, "nbytes": len(file.getvalue())}
        print(name, results["exports"][name], flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page.write(log, Path(folder) / "page.html")
        with Browser(Path(folder) / "profile", WIDTH, HEIGHT) as browser:
            results["browser"] = browser.call("Browser.getVersion")["product"]
            results |= measure(browser, Path(folder) / "page.html")
            if options.images:
                part = f"show({options.part})"
                for theme, by in (("light", "kind"), ("dark", "tag")):
                    path = options.images / f"recording-page-{theme}.png"
                    picture(browser, path, theme, by, part)
    print(json.dumps({key: results[key] for key in list(results)[-5:]}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
