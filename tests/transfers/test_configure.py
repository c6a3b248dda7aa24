# SPDX-License-Identifier: Apache-2.0
"""Tests of what configure() may set, where settings come from, and who follows them.

Settings are given by calls, blocks and variables of the environment, and the tests look
at the answer of configure() and at the routes of copies.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.tuning import tune, tuned

import cumem

VARIABLES = {
    "CUMEM_TRANSFER_THREADS": ("threads", "3", 3),
    "CUMEM_TRANSFER_RING": ("ring_nbytes", "64 MiB", 64 << 20),
}


@pytest.fixture(autouse=True)
def as_before(runtime, monkeypatch):
    """Take back all settings before and after the test, and open the runtime."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cumem.device_count()
    names = [name for name, _, _ in VARIABLES.values()]
    cumem.configure(**dict.fromkeys(names, "auto"))
    yield
    cumem.configure(**dict.fromkeys(names, "auto"))


def test_configure_without_arguments_only_reads():
    first = cumem.configure()
    assert first == cumem.configure()
    assert set(first.sources.values()) == {"default"}
    assert 1 <= first.threads <= 16


def test_configure_sets_what_is_given_and_auto_takes_it_back():
    before = cumem.configure()
    now = cumem.configure(threads=2)
    assert (now.threads, now.ring_nbytes) == (2, before.ring_nbytes)
    assert now.sources == {"threads": "configure", "ring_nbytes": "default"}
    assert cumem.configure(ring_nbytes=8 << 20).ring_nbytes == 8 << 20
    assert cumem.configure(threads="auto", ring_nbytes="auto") == before


def test_configure_as_a_block_takes_back_what_it_changed():
    cumem.configure(threads=9)
    with cumem.configure(threads=1) as inside:
        assert inside.threads == 1
        cumem.configure(ring_nbytes="2MiB")
    after = cumem.configure()
    assert after.threads == 9
    # The inner call changed this setting, so the block does not take it back.
    assert after.ring_nbytes == 2 << 20


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"threads": 0}, ValueError, "threads must be from 1 to 16, not 0"),
        ({"threads": 17}, ValueError, "threads must be from 1 to 16"),
        ({"threads": "many"}, TypeError, "threads must be an int"),
        ({"threads": 1.0}, TypeError, "threads must be an int"),
        ({"threads": True}, TypeError, "threads must be an int"),
        ({"ring_nbytes": "x"}, ValueError, r"'512 KiB' or '1\.5GB', not 'x'"),
        ({"ring_nbytes": 1.5}, TypeError, r"'512 KiB' or '1\.5GB', not float"),
        ({"threads": -1}, ValueError, "threads must not be negative"),
        ({"ring_nbytes": "50%"}, ValueError, "ring_nbytes"),
        ({"ring_nbytes": -1}, ValueError, "ring_nbytes"),
        ({"ring_nbytes": 1 << 50}, ValueError, "to 1 TiB, not 1 PiB"),
        ({"ring_nbytes": 1000}, ValueError, "ring_nbytes must be from 1 MiB"),
    ],
)
def test_configure_refuses_and_changes_nothing(arguments, error, says):
    before = cumem.configure()
    with pytest.raises(error, match=says):
        cumem.configure(**{"threads": 3, "ring_nbytes": "4 MiB", **arguments})
    assert cumem.configure() == before


@pytest.mark.parametrize("name", ["chunk_nbytes", "depth", "quick_nbytes"])
def test_values_that_are_no_settings_are_refused(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        cumem.configure(**{name: 4})


@pytest.mark.parametrize("variable", VARIABLES)
def test_variable_is_read_at_opening_and_configure_comes_first(monkeypatch, variable):
    name, text, value = VARIABLES[variable]
    cumem.shutdown()
    monkeypatch.setenv(variable, text)
    cumem.device_count()
    now = cumem.configure()
    assert getattr(now, name) == value
    assert now.sources[name] == "environment"
    low = {"threads": 1}.get(name, 1 << 20)
    assert getattr(cumem.configure(**{name: low}), name) == low
    assert getattr(cumem.configure(**{name: "auto"}), name) == value


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("text", ["-1", "no", "99999999999999999999", "4 MiB x", "7%"])
def test_wrong_variable_is_an_error_that_names_it(monkeypatch, variable, text):
    cumem.shutdown()
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=variable):
        cumem.configure()
    with pytest.raises(ValueError, match=variable):
        cumem.empty_pinned(1)
    monkeypatch.setenv(variable, "auto")
    cumem.device_count()
    assert "environment" not in cumem.configure().sources.values()


def test_configuration_is_readable():
    text = repr(cumem.configure(ring_nbytes="2MiB"))
    assert "ring_nbytes" in text
    assert "2 MiB" in text
    assert "<table>" in cumem.configure()._repr_html_()


def test_threshold_decides_the_route():
    src = np.arange(1 << 18, dtype=np.uint8)
    dst = cumem.empty_device(src.shape, src.dtype)
    with tuned(staged_up_nbytes=0):
        assert cumem.copy_async(dst, src).route == "staged"


def test_configure_while_copies_run_leaves_them_right():
    """A change applies to copies that begin later."""
    src = np.random.default_rng(3).integers(0, 255, 3 << 20, np.uint8)
    stop = threading.Event()
    failures = []

    def work():
        dst = cumem.empty_device(src.shape, src.dtype)
        back = np.empty_like(src)
        while not stop.is_set():
            cumem.copy_async(dst, src[::-1]).wait()
            cumem.copy_async(back, dst).wait()
            if not np.array_equal(back, src[::-1]):
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(60):
        tune(
            threads=1 + i % 5,
            chunk_nbytes=(64 << 10) << (i % 4),
            depth=2 + i % 7,
            ring_nbytes=1 << 20,
        )
    stop.set()
    for thread in threads:
        thread.join()
    tune(threads=None, chunk_nbytes=None, depth=None, ring_nbytes=None)
    assert not failures
