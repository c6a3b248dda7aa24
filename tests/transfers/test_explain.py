# SPDX-License-Identifier: Apache-2.0
"""cumem.explain() must say of a copy what the copy then does.

Each test explains a copy and makes it. Counters of the core then show which route the
copy took, and how many pieces and threads it used.
"""

from __future__ import annotations

import itertools
import mmap
import os
import types

import numpy as np
import pytest
from support import session
from support.session import testing
from support.tuning import tuned

import cumem
from cumem import _core

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

KINDS = ("pageable", "registered", "pinned", "mapped", "managed", "device", "device1")


@pytest.fixture(autouse=True)
def small_chunks(runtime):
    """Make pieces of 64 KiB, so that there are many of them."""
    cumem.device_count()
    with tuned(chunk_nbytes="64KiB", ring_nbytes="1MiB", threads=2):
        yield


def make(kind, shape, stack):
    """Make memory of a kind, of dtype float32."""
    if kind == "pageable":
        return np.zeros(shape, np.float32)
    if kind == "registered":
        array = np.zeros(shape, np.float32)
        stack.append(cumem.register(array))
        return array
    if kind == "device1":
        return cumem.empty_device(shape, np.float32, device=1)
    return cumem.empty(shape, np.float32, kind)


def transposed(end):
    return end.T


VIEWS = {
    "whole": lambda end: end,
    "reversed": lambda end: end[::-1],
    "every second": lambda end: end[:, ::2],
    "rows": lambda end: end[:, : end.shape[1] // 2],
    "transposed": transposed,
    "row": lambda end: end[:1],
    "empty": lambda end: end[:0],
}
SHAPES = ((6, 10), (100, 100), (600, 900))


def expected_counts(reported, before):
    """Return what the counters of copies must be after the copy that was explained."""
    counts = dict(before)
    if reported.is_quick:
        counts["quick"] += 1
        counts["bounced"] += reported.is_bounced
    else:
        counts[reported.route] += 1
    if reported.route in ("staged", "staged-kernel", "peer-staged") or (
        reported.route == "peer" and reported.loops > 0
    ):
        counts["pieces"] += reported.pieces
    return counts


def check(dst, src, *, blocking, stream=None):
    """Compare what explain() says with what the copy does, and return what explain()
    said.
    """
    # Copies on an idle stream take other routes, so all devices are made idle first.
    for index in range(cumem.device_count()):
        cumem.Device(index).synchronize()
    reported = _core._explain(dst, src, stream, blocking)
    said = cumem.explain(dst, src, stream=stream, blocking=blocking)
    before = testing.copy_counts()
    if blocking:
        cumem.copy(dst, src, stream=stream)
    else:
        transfer = cumem.copy_async(dst, src, stream=stream)
        transfer.wait()
        assert transfer.route == said.route
        assert transfer.nbytes == said.nbytes
    assert testing.copy_counts() == expected_counts(reported, before)
    assert said.route == reported.route
    # Users see words, not the name of the route.
    assert said.how != said.route or said.route == "nothing"
    assert said.why
    assert said.route in repr(said)
    assert said.why.split(";")[0][:20] in repr(said)
    assert "<table>" in said._repr_html_()
    assert (said.pieces == 0) == (said.route == "nothing")
    if said.pieces > 0:
        assert said.pieces * said.piece_nbytes >= said.nbytes
    return said


def pairs(count):
    """Return all pairs of kinds that exist with this number of devices."""
    if count < 2:
        return [
            pair for pair in itertools.product(KINDS, KINDS) if "device1" not in pair
        ]
    return list(itertools.product(KINDS, KINDS))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_explain_reports_the_route_of_every_pair(view, shape):
    stack: list[cumem.types.Registration] = []
    routes = set()
    for dst_kind, src_kind in pairs(cumem.device_count()):
        if view == "transposed":
            dst = make(dst_kind, shape[::-1], stack)
            src = VIEWS[view](make(src_kind, shape, stack))
        else:
            dst = VIEWS[view](make(dst_kind, shape, stack))
            src = VIEWS[view](make(src_kind, shape, stack))
            if view == "reversed":
                src = src[::-1]
        for blocking in (True, False):
            said = check(dst, src, blocking=blocking)
            routes.add(said.route)
        if "device" in (dst_kind, src_kind):
            stream = cumem.Stream(device=0)
            check(dst, src, blocking=False, stream=stream)
        while stack:
            stack.pop().close()
    assert routes if view != "empty" else routes == {"nothing"}


@pytest.mark.parametrize("kind", ["device", "pinned", "pageable"])
def test_explain_of_a_repeated_source(kind):
    dst = make(kind, (300, 400), [])
    for src in (2.5, np.float32(1), np.arange(400, dtype=np.float32), [[3.0]] * 300):
        for blocking in (True, False):
            check(dst, src, blocking=blocking)
    said = cumem.explain(dst, 2.5)
    assert said.nbytes == 4  # A repeated value crosses the link once.


@pytest.mark.parametrize("kind", ["device", "pinned", "pageable"])
@pytest.mark.parametrize("blocking", [True, False])
def test_explain_of_overlapping_ends(kind, blocking):
    both = make(kind, (300, 400), [])
    said = check(both[1:], both[:-1], blocking=blocking)
    assert "overlap" in said.why
    said = check(both[::-1], both, blocking=blocking)
    assert "overlap" in said.why
    assert "same memory" in check(both, both, blocking=blocking).why


def test_explain_takes_one_shape_to_pieces_along_its_outer_axis():
    src = np.zeros((4, 50, 1000), np.float32)
    dst = cumem.empty_device(src.shape, src.dtype)
    said = check(dst, src, blocking=False)
    assert (said.pieces, said.piece_nbytes, said.axis) == (13, 64 << 10, 0)
    said = check(dst[0].reshape(50, 1000), src[0], blocking=False)
    assert (said.pieces, said.axis) == (4, 0)
    # The rows lie at equal distances, so each piece consists of whole rows.
    wide = np.zeros((4, 100, 1000), np.float32)
    said = check(dst, wide[:, ::2], blocking=False)
    assert (said.pieces, said.piece_nbytes, said.axis) == (13, 64000, 0)
    # These are four runs of 50 rows.
    said = check(dst, wide[:, :50], blocking=False)
    assert (said.pieces, said.piece_nbytes, said.axis) == (16, 64 << 10, 1)
    said = check(dst[0, 0], src[0, 0], blocking=False)
    assert (said.pieces, said.axis, said.chunks) == (1, None, 1)


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("what", ["short", "long", "strided", "shifted"])
def test_explain_counts_the_threads_that_copy_between_hosts(what, blocking):
    source = np.ones(32 << 20, np.uint8)
    pinned = np.zeros(32 << 20, np.uint8)
    ends = {
        "short": (pinned[:900_000], source[:900_000], 1),
        "long": (pinned, source, 3),
        "strided": (pinned[::2], source[::2], 3),
        "shifted": (source[1:], source[:-1], 1),
    }
    dst, src, expected = ends[what]
    with session.opened("emulated"), cumem.configure(threads=3):
        check(np.zeros(8, np.uint8), np.ones(8, np.uint8), blocking=blocking)
        # Before the copy there are the device's threads and one worker.
        before = threads_of_this_process()
        said = check(dst, src, blocking=blocking)
        assert said.threads == expected
        assert threads_of_this_process() - before == expected - 1
        one = ("the calling thread" if blocking else "a thread of the host") in said.why
        assert one == (expected == 1)


def test_explain_says_at_most_how_long_the_pieces_are():
    src = np.zeros(1 << 20, np.uint8)
    with tuned(chunk_nbytes="256KiB"):
        said = cumem.explain(cumem.empty_device(src.shape, src.dtype), src[::-1])
    assert said.pieces > 1
    assert f"{said.pieces} of at most " in repr(said)


def test_explain_follows_the_configuration():
    src = np.zeros(1 << 20, np.uint8)
    dst = cumem.empty_device(src.shape, src.dtype)
    first = cumem.explain(dst, src, blocking=False)
    assert (first.pieces, first.threads, first.chunks) == (16, 2, 8)
    with tuned(threads=1, depth=3, chunk_nbytes="256KiB"):
        said = check(dst, src, blocking=False)
        assert (said.pieces, said.threads, said.chunks) == (4, 1, 3)
    with tuned(staged_up_nbytes=0, quick_nbytes=0):
        assert check(dst, src, blocking=True).route == "staged"
    with tuned(staged_up_nbytes=1 << 40, quick_nbytes=0):
        said = check(dst, src, blocking=True)
        assert said.route == "direct"
        assert "at any size" in said.why


@pytest.mark.parametrize("step", [1, 2])
def test_explain_of_devices_apart(step):
    small = tuned(chunk_nbytes="1MiB", ring_nbytes="8MiB")
    with session.opened("emulated", peers=0), small:
        src = cumem.zeros((step, 10 << 20), np.uint8, "device", device=0)[0]
        dst = cumem.zeros((10 << 20) * step, np.uint8, "device", device=1)[::step]
        cumem.Device(1).synchronize()
        said = check(dst, src, blocking=False)
        assert said.route == "peer-staged"
        assert (said.pieces, said.piece_nbytes, said.axis) == (10, 1 << 20, 0)
        assert said.chunks == 3
        assert "3, " in repr(said)
        cumem.configure(ring_nbytes="2MiB")
        assert check(dst, src, blocking=False).chunks == 2
        cumem.configure(ring_nbytes="auto")
        del src, dst


def test_explain_asks_whether_the_stream_is_idle(emulated):
    src = np.zeros(1000, np.uint8)
    stream = cumem.Stream(device=0)
    dst = cumem.empty_device(src.shape, src.dtype, stream=stream)
    other = cumem.empty_device(1 << 10, np.uint8, stream=stream)
    assert "at once" in cumem.explain(dst, src, stream=stream).why
    with session.gate(stream):
        other.fill(1, stream=stream)
        busy = cumem.explain(dst, src, stream=stream)
        assert "at once" not in busy.why
        assert busy.route == "direct"


def test_explain_copies_nothing_and_allocates_nothing():
    src = np.full(1 << 20, 7, np.uint8)
    dst = np.zeros(1 << 20, np.uint8)
    device = cumem.zeros(1 << 20, np.uint8, "device")
    cumem.copy(dst, device)
    cumem.Device(0).synchronize()
    pools = _core._pools()
    counts = testing.copy_counts()
    for ends in ((device, src), (dst, device), (dst, src), (device[::2], src[::2])):
        for blocking in (True, False):
            cumem.explain(*ends, blocking=blocking)
    assert _core._pools() == pools
    assert testing.copy_counts() == counts
    assert not dst.any()


@pytest.mark.parametrize(
    ("dst", "src", "error"),
    [
        (np.zeros(3), np.zeros(4), ValueError),
        (np.zeros(3), np.zeros(3, np.float32), TypeError),
        (b"abc", np.zeros(3, np.uint8), ValueError),
        (object(), np.zeros(3), TypeError),
    ],
)
def test_explain_refuses_what_copy_refuses(dst, src, error):
    with pytest.raises(error) as copied:
        cumem.copy(dst, src)
    with pytest.raises(error) as explained:
        cumem.explain(dst, src)
    assert str(copied.value) == str(explained.value)


def test_short_copies_are_quick_again_once_a_transfer_is_done(emulated):
    src = np.zeros(1 << 16, np.uint8)
    dst = cumem.empty_device(src.shape, src.dtype)
    cumem.copy_async(dst, src).wait()
    before = testing.copy_counts()["quick"]
    cumem.copy(dst, src)
    assert testing.copy_counts()["quick"] == before + 1


def test_new_pages_are_made_by_several_threads_whoever_is_faster_else(emulated):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    src = cumem.full(12 << 20, 7, "u1", "device")
    sizes = {"quick_nbytes": 0, "chunk_nbytes": "8MiB", "ring_nbytes": "64MiB"}
    with tuned(staged_down_nbytes=1 << 40, threads=2, **sizes):
        target = np.frombuffer(mmap.mmap(-1, src.nbytes, flags=flags), "u1")
        reported = check(target, src, blocking=True)
        assert (reported.route, reported.piece_nbytes) == ("staged", 2 << 20)
        assert "new pages of ordinary memory are made" in reported.why
        assert (target == 7).all()
        reported = check(target, src, blocking=True)
        assert reported.route == "direct"
        assert "at any size" in reported.why
    with tuned(staged_down_nbytes=1 << 40, threads=1):
        target = np.frombuffer(mmap.mmap(-1, src.nbytes, flags=flags), "u1")
        assert check(target, src, blocking=True).route == "direct"


PIXELS = (3, 64, 64, 3)
#: Each entry has a view of pixels, and the route by which it must be sent.
ORDERS = {
    "planes": (lambda pixels: pixels.transpose(0, 3, 1, 2), "staged-kernel"),
    "upside down": (lambda p: p[:, ::-1].transpose(0, 3, 1, 2), "staged-kernel"),
    "other colours first": (lambda p: p[..., ::-1], "staged"),
    "one of three": (lambda pixels: pixels[..., 1], "staged"),
    "two of three": (lambda p: p[..., :2].transpose(0, 3, 1, 2), "staged"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_device_sorts_what_is_sent_whole(emulated, order):
    pixels = np.random.default_rng(3).integers(0, 256, PIXELS, "u1")
    view, route = ORDERS[order]
    src = view(pixels)
    dst = cumem.empty_device(src.shape, src.dtype)
    assert check(dst, src, blocking=True).route == route
    assert np.array_equal(dst.to_numpy(), src)


def test_explain_of_a_way_that_it_has_no_reason_for(monkeypatch):
    facts = _core._explain(cumem.empty_device(8, "u1"), np.zeros(8, "u1"), None, True)
    said = cumem.explain(np.empty(8, "u1"), np.zeros(8, "u1"))
    assert (said.route, said.how) == ("host", "by the processor")
    known = dict(zip(facts.__match_args__, facts, strict=True))
    reported = types.SimpleNamespace(**known | {"route": "new"})
    monkeypatch.setattr(_core, "_explain", lambda *ends: reported)
    said = cumem.explain(None, None)
    assert (said.route, said.how) == ("new", "new")
    assert said.why == "new is the first route that is possible for both ends"
    assert "route     new" in repr(said)
