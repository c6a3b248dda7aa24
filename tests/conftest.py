# SPDX-License-Identifier: Apache-2.0
"""Fixtures and hooks of pytest: which runtime a test uses, and what it may leave behind."""

from __future__ import annotations

import collections
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.register_assert_rewrite("support")

from support import session  # noqa: E402

# Texts are broken at the width of the terminal, which no test may depend on. The tests of
# the width (test_width.py) set it themselves.
os.environ["COLUMNS"] = "200"

hypothesis.settings.register_profile(
    "quick",
    deadline=None,  # emulated streams are late on purpose, which takes time
    max_examples=40,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("quick"), max_examples=150
)
hypothesis.settings.register_profile(
    "night", parent=hypothesis.settings.get_profile("quick"), max_examples=5000
)
hypothesis.settings.load_profile(os.environ.get("CUMEM_HYPOTHESIS", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which `.ci/pythons` shares cases out between versions of Python."""
    parser.addoption(
        "--share",
        default="0/1",
        metavar="NUMBER/COUNT",
        help="run the cases of parametrized tests that are of this one of COUNT runs",
    )


def pytest_configure() -> None:
    """Make Ctrl-C work even if a shell runs the suite in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Say which core is tested. On one without hooks many tests are skipped."""
    hooks = "with hooks" if session.testing.HAS_HOOKS else "without hooks"
    return f"core: {session.testing.core_path()} ({hooks})"


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect tests that are not for this run.

    Tests that need a GPU run only if -m asks for them. If -m asks for by_driver, only those
    tests run that depend on an operation which the emulated driver lacks. The rest is
    shared out between runs as --share says (`is_of_another_run`).
    """
    asked = config.option.markexpr or ""
    number, count = map(int, config.option.share.split("/"))
    places = collections.Counter[str]()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        is_left = "gpu" not in asked and item.get_closest_marker("gpu") is not None
        if "by_driver" in asked and not is_left:
            is_left = not lacking(item)
        if not is_left:
            is_left = is_of_another_run(item, places, number, count)
        (left if is_left else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def is_of_another_run(
    item: pytest.Item, places: collections.Counter[str], number: int, count: int
) -> bool:
    """Return whether another of `count` runs has this case of a parametrized test.

    The cases of a test take turns between the runs, of which this is run `number`. The
    first case runs in all of them, and so does a test without parameters. `places` counts
    the cases of each test that have come before.
    """
    test = item.nodeid.partition("[")[0]
    place = places[test]
    places[test] += 1
    return place > 0 and place % count != number


def lacking(item: pytest.Item) -> set[str]:
    """Return the operations that a test depends on and the emulated driver lacks."""
    if not session.testing.HAS_HOOKS:
        return set()
    oldest = {name: driver for name, _, driver in session.testing.op_names()}
    named = {name for mark in item.iter_markers("by_driver") for name in mark.args}
    return {name for name in named if oldest[name] > session.emulated_driver()}


collected_for: list[object] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose hooks are missing, and let the collector ignore older objects.

    Each test runs a collection, which takes long if there are many objects: a test may
    import a library with a hundred thousand of them, and pytest keeps some more for each
    test that has run. So all objects that exist before a test are made permanent. The
    collector never frees a permanent object, and so collects first wherever older tests
    may have left garbage that matters: at the first test of a file, after a test that
    failed, and if a test without fixtures has left the runtime open.
    """
    if item.get_closest_marker("hooks") and not session.testing.HAS_HOOKS:
        pytest.skip(session.testing.WITHOUT_HOOKS)
    place = [item.path, item.session.testsfailed]
    if collected_for != place or session.testing.opened():
        collected_for[:] = place
        gc.collect()
    gc.freeze()


@pytest.fixture(
    params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def runtime(request: pytest.FixtureRequest) -> Iterator[session.Runtime]:
    """Open cumem on one backend for a test, and check that nothing is left afterwards."""
    with session.opened(request.param) as opened:
        yield opened


@pytest.fixture
def emulated() -> Iterator[session.Runtime]:
    """Open the emulated device, for tests of its gates, faults and hostility."""
    with session.opened("emulated") as opened:
        yield opened


@pytest.fixture
def cuda() -> Iterator[session.Runtime]:
    """Open a real GPU, for tests marked `gpu` of properties that emulation cannot show."""
    with session.opened("cuda") as opened:
        yield opened
