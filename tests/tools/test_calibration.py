# SPDX-License-Identifier: Apache-2.0
"""cumem.calibrate(): what is kept, what is believed, and what follows from it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading

import numpy as np
import pytest
from support import session

import cumem
from cumem import _core
from cumem.tools import calibration, measuring
from cumem.transfers import tuning

# The C core alone decides what is tested here; Python only calls it.
pytestmark = pytest.mark.any_python


class Unit:
    """As a Device that is real."""

    index = 0
    name = "NVIDIA H200"
    pci_bus_id = "0000:1b:00.0"
    emulated = False


def is_calibrated() -> bool:
    return bool(tuning.layers[tuning.CALIBRATION])


@pytest.fixture
def figures(emulated):
    """Those of a machine with fewer threads and a slower link."""
    cumem.device_count()
    assert not is_calibrated()
    return {
        **measuring.DEFAULTS,
        "up_rate": 12e9,
        "down_rate": 12e9,
        "dma_gap_ns": 10e3,
    }


@pytest.fixture
def real(figures, monkeypatch, tmp_path):
    """A device that counts how often it is measured; files go to `tmp_path`."""
    calls = []

    def measure(index):
        calls.append(index)
        return dict(figures)

    monkeypatch.setattr(calibration, "Device", lambda where: Unit())
    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUMEM_CALIBRATION", raising=False)
    return calls


def files(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_calibrate_on_the_emulated_device_gives_the_defaults(emulated, tmp_path):
    found = cumem.calibrate(again=True)
    assert (found.source, found.path) == ("default", None)
    assert found.figures["up_rate"] == 55e9
    assert cumem.configure().sources["chunk_nbytes"] == "default"
    assert "GB/s" in repr(found)
    assert "<table>" in found._repr_html_()
    with pytest.raises(ValueError, match="device"):
        cumem.calibrate(99)


def test_figures_are_measured_once_and_kept(real, figures, tmp_path):
    first = cumem.calibrate()
    assert (first.source, first.figures, real) == ("measured", figures, [0])
    assert files(tmp_path) == [os.path.relpath(first.path, tmp_path)]
    now = cumem.configure()
    assert now.sources["chunk_nbytes"] == "calibration"
    assert now.chunk_nbytes == 2 << 20
    measuring.use(None)
    second = cumem.calibrate()
    assert (second.source, second.figures, real) == ("kept", figures, [0])
    assert second.path == first.path
    assert cumem.configure() == now
    assert cumem.calibrate(again=True).source == "measured"
    assert real == [0, 0]
    with open(first.path, encoding="utf-8") as file:
        content = json.load(file)
    assert content["key"]["device"] == Unit.name
    assert content["key"]["cumem"] == cumem.__version__


def test_explanations_and_configuration_follow_the_figures(real, figures):
    src = np.zeros(64 << 20, np.uint8)
    device = cumem.empty_device(src.shape, src.dtype)
    assert cumem.explain(device, src[::-1]).piece_nbytes == 8 << 20
    cumem.calibrate()
    assert cumem.explain(device, src[::-1]).piece_nbytes == 2 << 20
    with cumem.configure(chunk_nbytes="8MiB") as now:
        assert now.sources["chunk_nbytes"] == "configure"
        assert now.sources["depth"] == "calibration"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "{",
        lambda text: "[]",
        lambda text: "null",
        lambda text: text[: len(text) // 2],
        lambda text: "\x00\xff" + text,
        lambda text: "[" * 100_000,
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace(Unit.name, "another"),
        lambda text: text.replace('"up_rate"', '"up"'),
        lambda text: text.replace("12000000000.0", '"fast"'),
        lambda text: text.replace("12000000000.0", "-1"),
        lambda text: text.replace("12000000000.0", "NaN"),
        lambda text: text.replace("12000000000.0", "1e300"),
        lambda text: text.replace("12000000000.0", "null"),
        lambda text: text + " " * (1 << 20),
    ],
)
def test_file_that_is_not_ours_is_measured_anew(real, figures, change):
    first = cumem.calibrate()
    with open(first.path, encoding="utf-8") as file:
        text = file.read()
    changed = change(text)
    assert changed != text
    with open(first.path, "w", encoding="latin-1") as file:
        file.write(changed)
    assert cumem.calibrate().source == "measured"
    assert len(real) == 2
    assert cumem.calibrate().source == "kept"  # it was written again


def test_key_tells_machines_apart(real, monkeypatch):
    first = cumem.calibrate()
    monkeypatch.setattr(_core, "_processors", lambda: (3, 1))
    assert cumem.calibrate().path != first.path


def test_directory_that_cannot_be_written_is_no_error(real, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    found = cumem.calibrate()
    assert (found.source, found.path) == ("measured", None)
    assert cumem.calibrate().source == "measured"
    assert blocked.read_text() == "no directory"


def test_home_is_used_where_no_cache_directory_is_named(real, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = cumem.calibrate()
    assert found.path.startswith(str(tmp_path / ".cache" / "cumem"))
    assert os.stat(os.path.dirname(found.path)).st_mode & 0o077 == 0


def test_variable_names_the_file_or_switches_it_off(real, monkeypatch, tmp_path):
    path = tmp_path / "here" / "figures.json"
    monkeypatch.setenv("CUMEM_CALIBRATION", str(path))
    assert cumem.calibrate().path == str(path)
    assert cumem.calibrate().source == "kept"
    monkeypatch.setenv("CUMEM_CALIBRATION", "off")
    found = cumem.calibrate()
    assert (found.source, found.path) == ("measured", None)
    assert files(tmp_path) == ["here/figures.json"]


def test_threads_that_write_at_once_leave_one_whole_file(real, figures, tmp_path):
    path = tmp_path / "figures.json"
    key = calibration.machine_key(Unit())
    threads = [
        threading.Thread(target=calibration._store, args=(path, key, figures))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calibration._load(path, key) == figures
    assert files(tmp_path) == ["figures.json"]


def test_kept_figures_are_taken_and_nothing_is_measured_unasked(real, figures):
    calibration.take_kept(0)  # nothing kept
    assert not is_calibrated()
    cumem.calibrate()
    measuring.use(None)
    calibration.take_kept(0)
    assert is_calibrated()
    assert real == [0]  # by calibrate() alone


def test_kept_figures_are_not_taken_when_switched_off(real, monkeypatch):
    cumem.calibrate()
    measuring.use(None)
    monkeypatch.setenv("CUMEM_CALIBRATION", "off")
    calibration.take_kept(0)
    assert not is_calibrated()


def test_measuring_itself_runs_on_the_emulated_device(emulated):
    """Its times mean nothing there; nothing may be left behind."""
    cumem.device_count()
    before = session.testing.counts()
    found = measuring.measure(0)
    assert found.keys() == measuring.DEFAULTS.keys()
    assert all(value >= 0 for value in found.values())
    assert found["up_rate"] > 0
    assert not is_calibrated()
    cumem.trim()
    assert session.testing.counts()["streams"] <= before["streams"] + 4


@pytest.mark.parametrize("nth", [1, 2, 5, 9])
@pytest.mark.parametrize("op", ["copy_async", "stream_synchronize", "event_record"])
def test_measuring_that_fails_changes_nothing(emulated, op, nth):
    cumem.device_count()
    before = cumem.configure()
    session.testing.plan_fault(op, nth, 719)
    try:
        with contextlib.suppress(cumem.CudaError):
            measuring.measure(0)
        assert session.testing.fault_struck() is not None
    finally:
        session.testing.plan_fault(None, 0)
    assert cumem.configure() == before


STEPS = ["links", "driver", "threads", "waking", "crossings"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_measuring_that_is_ended_leaves_earlier_figures_and_choices(
    figures, monkeypatch, step, error
):
    measuring.use(figures)
    with cumem.configure(threads=3):
        before, layers = cumem.configure(), list(tuning.layers)

        def end(self):
            tuning.stand_alone({"thread_count": 1, "slot_count": 3})
            raise error

        for name in STEPS:
            change = end if name == step else lambda self: None
            monkeypatch.setattr(measuring._Bench, name, change)
        with pytest.raises(error):
            measuring.measure(0)
        assert cumem.configure() == before
        assert tuning.layers == layers
    measuring.use(None)


def test_measuring_heeds_no_earlier_figures_and_no_choices(figures, monkeypatch):
    plain, seen = _core._read_tuning(False), []
    monkeypatch.setattr(
        measuring._Bench, "run", lambda self: seen.append(_core._read_tuning(False))
    )
    measuring.use(figures)
    with cumem.configure(threads=1, depth=3, chunk_nbytes="1MiB") as chosen:
        measuring.measure(0)
        assert cumem.configure() == chosen
    assert seen == [plain]
    measuring.use(None)


def test_two_threads_measure_one_after_the_other(emulated, monkeypatch):
    cumem.device_count()
    before, running = cumem.configure(), []

    def run(self):
        running.append(1)
        assert len(running) == 1
        tuning.stand_alone({"thread_count": 1})
        cumem.copy(self.pinned, self.host)  # lets others run
        running.pop()

    monkeypatch.setattr(measuring._Bench, "run", run)
    failed = []

    def measure() -> None:
        try:
            measuring.measure(0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert cumem.configure() == before


def test_measuring_that_is_interrupted_leaves_no_thread(emulated, monkeypatch):
    cumem.device_count()
    bench = measuring._Bench(0)
    before = threading.active_count()

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.waking()
    assert threading.active_count() == before


def test_measuring_copies_on_its_own_stream_alone(emulated, monkeypatch):
    """The caller's current one may be busy."""
    cumem.device_count()
    bench, copy, seen = measuring._Bench(0), _core.copy, []

    def spied(dst, src, *, stream=None):
        seen.append(stream)
        copy(dst, src, stream=stream)

    monkeypatch.setattr(_core, "copy", spied)
    bench.end = math.inf
    try:
        bench.run()
    finally:
        tuning.stand_alone(None)
    assert seen
    assert set(seen) == {bench.stream}


@pytest.mark.parametrize("noise", [-100e3, -1.0, 0.0, 100e3])
def test_links_are_never_faster_than_their_chain_allows(emulated, monkeypatch, noise):
    """A short chain that was held up is not a fast link."""
    cumem.device_count()
    bench = measuring._Bench(0)

    def chain_ns(dst, src, count, short=0):
        return 500e3 if count > 1 else 500e3 + noise

    monkeypatch.setattr(bench, "chain_ns", chain_ns)
    bench.links()
    for way in ("up_rate", "down_rate"):
        assert 4 * (8 << 20) / 500e-6 < bench.figures[way] <= 8 * (8 << 20) / 500e-6
    measuring.derive(bench.figures, 16)


@pytest.mark.parametrize(("pieces", "wins"), [(101, False), (99, False), (90, True)])
def test_pieces_that_win_by_noise_do_not_win(emulated, monkeypatch, pieces, wins):
    cumem.device_count()
    bench = measuring._Bench(0)
    spent = iter([pieces, 100])
    monkeypatch.setattr(bench, "least_ns", lambda function, cold=0: next(spent))
    try:
        assert bench.staged_wins("up", 1 << 20) is wins
    finally:
        tuning.stand_alone(None)


def test_counts_of_threads_without_time_follow_those_measured(emulated, monkeypatch):
    """Not the default machine: its eight are no eight of a slower one's."""
    cumem.device_count()
    bench = measuring._Bench(0)
    bench.cpu_count, bench.end = 8, -math.inf
    monkeypatch.setattr(bench, "least_ns", lambda function, cold=0: 8 * 2**20)
    try:
        bench.threads()
    finally:
        tuning.stand_alone(None)
    found = [bench.figures[f"copy_rate_{n}"] for n in (1, 2, 4, 8, 16)]
    assert found[0] == 1e9
    assert found[1:4] == pytest.approx([1e9 * n / 9.6 for n in (19, 36, 48)])
    assert found[4] == 0


@pytest.mark.parametrize("cpu_count", [3, 5, 6, 12, 15])
def test_all_processors_are_measured_whatever_their_number(
    emulated, monkeypatch, cpu_count
):
    cumem.device_count()
    bench, now = measuring._Bench(0), []
    bench.cpu_count, bench.end = cpu_count, math.inf
    monkeypatch.setattr(measuring, "stand_alone", now.append)
    monkeypatch.setattr(
        bench, "least_ns", lambda *_: (8 << 20) / now[-1]["thread_count"]
    )
    bench.threads()
    for count in range(1, cpu_count + 1):
        rate = measuring.copy_rate(bench.figures, count)
        assert rate == pytest.approx(count * 1e9)
    assert measuring.derive(bench.figures, cpu_count)["thread_count"] is None


def test_slow_link_is_not_measured_over_and_over(emulated):
    bench = measuring._Bench(0)
    calls = []
    bench.end = -math.inf
    bench.least_ns(lambda: calls.append(1))
    assert len(calls) == 2  # the first of which makes what it needs


# -- what follows from figures ---------------------------------------------------------


def derived(cpu_count: int, **figures: float) -> dict:
    return measuring.derive(measuring.DEFAULTS | figures, cpu_count)


def test_defaults_are_what_follows_from_the_figures_of_the_default_machine(emulated):
    """There all is as on 16 cores."""
    cumem.device_count()
    rows = dict(_core._read_tuning(True))
    found = derived(16)
    assert found["thread_count"] is found["fresh_thread_count"] is None
    for field in (
        "chunk_nbytes",
        "slot_count",
        "staged_up_nbytes",
        "staged_down_nbytes",
    ):
        assert found[field] == rows[field][0]


def test_one_processor_leaves_ordinary_memory_to_the_runtime():
    """The runtime's own copy then is no slower: one thread packs what it could copy."""
    one, two, four = derived(1), derived(2), derived(4)
    assert one["staged_up_nbytes"] == one["staged_down_nbytes"] == tuning.NEVER
    assert one["chunk_nbytes"] <= 1 << 20  # what still is staged stays in the cache
    assert one["thread_count"] is None
    assert two["staged_up_nbytes"] < tuning.NEVER == two["staged_down_nbytes"]
    assert four["staged_down_nbytes"] < tuning.NEVER


def test_slow_link_of_a_laptop():
    found = derived(
        2,
        up_rate=12e9,
        down_rate=12e9,
        dma_gap_ns=10e3,
        copy_rate_1=8e9,
        copy_rate_2=14e9,
        driver_up_rate=6e9,
        driver_down_rate=6e9,
        staged_up_nbytes=1536 << 10,
        staged_down_nbytes=2 << 20,
    )
    assert found["chunk_nbytes"] == 2 << 20
    assert found["slot_count"] == 4
    assert found["staged_up_nbytes"] == found["staged_down_nbytes"] == 2 << 20


def test_fast_memory_needs_fewer_threads():
    rates = {"copy_rate_1": 20e9, "copy_rate_2": 39e9, "copy_rate_4": 70e9}
    fast = derived(64, **rates, copy_rate_8=130e9, copy_rate_16=200e9)
    assert (fast["thread_count"], fast["fresh_thread_count"]) == (5, 16)
    # More threads that get in each other's way are left out as well.
    assert derived(64, copy_rate_8=30e9, copy_rate_16=20e9)["thread_count"] == 4
    # And those that win by noise.
    assert derived(64, copy_rate_8=36.3e9, copy_rate_16=37e9)["thread_count"] == 4


def test_rates_that_differ_in_their_last_bit_give_a_chunk():
    rate = 30e9
    while 1 / rate != 1 / math.nextafter(rate, math.inf):
        rate += 1e9
    link = math.nextafter(rate, math.inf)
    assert 1 / rate == 1 / link
    rates = {f"copy_rate_{n}": rate for n in (1, 2, 4, 8, 16)}
    found = derived(16, up_rate=link, down_rate=link, **rates)
    assert found == derived(16, up_rate=rate, down_rate=rate, **rates)


@pytest.mark.parametrize("field", [None, *measuring.DEFAULTS])
@pytest.mark.parametrize("value", [0, 1e-300, 1, 1e14, -1, math.nan, math.inf, 1e300])
def test_figures_that_make_no_sense_give_settings_or_an_error(emulated, field, value):
    """A file from elsewhere may say anything."""
    fields = measuring.DEFAULTS if field is None else [field]
    figures = measuring.DEFAULTS | dict.fromkeys(fields, value)
    if 0 <= value < 1e15:
        measuring.use(figures)
        assert is_calibrated()
        measuring.use(None)
    else:
        with pytest.raises(ValueError, match="no such figure"):
            measuring.use(figures)
    assert not is_calibrated()


def test_copy_rate_lies_between_those_measured():
    known = measuring.DEFAULTS
    for count in (1, 4, 16):
        assert measuring.copy_rate(known, count) == known[f"copy_rate_{count}"]
    assert measuring.copy_rate(known, 40) == known["copy_rate_16"]
    assert known["copy_rate_2"] < measuring.copy_rate(known, 3) < known["copy_rate_4"]
    fewer = known | {"copy_rate_8": 0.0}
    assert measuring.copy_rate(fewer, 16) == known["copy_rate_4"]


# -- what is kept ----------------------------------------------------------------------


def test_figures_are_forgotten_at_shutdown(real, figures):
    cumem.calibrate()
    assert is_calibrated()
    assert "calibration" in cumem.configure().sources.values()
    cumem.shutdown()
    assert "calibration" not in cumem.configure().sources.values()
    assert not is_calibrated()


@pytest.fixture
def looked(emulated, monkeypatch):
    """The devices whose kept figures were looked for, as on a real device."""
    calls = []
    cumem.device_count()
    session.testing.calibrate_emulated()
    monkeypatch.setattr(calibration, "take_kept", calls.append)
    monkeypatch.setattr(measuring, "measure", None)  # nobody measures
    return calls


def test_the_first_copy_that_notices_looks_for_kept_figures_once(looked):
    long = np.zeros(64 << 20, np.uint8)
    device = cumem.empty_device(long.shape, np.uint8)
    cumem.copy(device[:1000], long[:1000])
    assert looked == []
    cumem.copy(device[:100_000], long[:100_000])
    cumem.copy(device, long)
    cumem.copy(long, device)
    cumem.copy_async(device, long).wait()
    assert looked == [0]


def test_reading_how_copies_are_made_looks_for_kept_figures_once(looked):
    cumem.configure()
    cumem.explain(np.zeros(3), np.zeros(3))
    cumem.configure()
    assert looked == [0]


def test_figures_that_were_set_are_not_replaced_by_kept_ones(looked, figures):
    measuring.use(figures)
    cumem.configure()
    assert looked == []


def test_failure_to_look_ends_no_copy(looked, monkeypatch):
    unraisable = []
    monkeypatch.setattr(
        "sys.unraisablehook", lambda info: unraisable.append(info.exc_type)
    )

    def fails(index):
        raise ValueError("broken")

    monkeypatch.setattr(calibration, "take_kept", fails)
    src = np.arange(1 << 20, dtype=np.uint8)
    device = cumem.empty_device(src.shape, np.uint8)
    cumem.copy(device, src)
    back = np.empty_like(src)
    cumem.copy(back, device)
    assert np.array_equal(back, src)
    assert unraisable == [ValueError]


def test_interrupt_while_looking_ends_the_copy(looked, monkeypatch):
    def interrupted(index):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "take_kept", interrupted)
    src = np.ones(1 << 20, np.uint8)
    device = cumem.zeros(src.shape, np.uint8, "device")
    with pytest.raises(KeyboardInterrupt):
        cumem.copy(device, src)
    cumem.copy(device, src)  # it was asked once


def test_file_is_written_through_no_link(real, figures, monkeypatch, tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "figures.json"
    victim.write_text("mine")
    key = calibration.machine_key(Unit())
    name = f"{path.name}.{os.getpid()}-{threading.get_ident()}.new"
    (tmp_path / name).symlink_to(victim)
    assert calibration._store(path, key, figures)
    path.unlink()
    path.symlink_to(victim)
    assert calibration._store(path, key, figures)
    assert calibration._load(path, key) == figures
    assert victim.read_text() == "mine"
    assert not path.is_symlink()


def test_fifo_keeps_no_figures_and_is_not_waited_for(real, monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    os.mkfifo(path)
    monkeypatch.setenv("CUMEM_CALIBRATION", str(path))
    found = cumem.calibrate()
    assert (found.source, found.path) == ("measured", None)
    assert path.is_fifo()
