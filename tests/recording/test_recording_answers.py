# SPDX-License-Identifier: Apache-2.0
"""Tests of the groups, peaks, leaks and differences that a record finds.

The tests plant leaks and peaks at lines that they know, and look for these lines in the
answers.
"""

from __future__ import annotations

import collections
import json
import os
from typing import Any

import numpy as np
import pytest
from support.lines import here, nothing_runs  # noqa: F401
from support.recorded import rows

import cumem
from cumem.recording.events import EVENT, OPS, Log

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python
MIB = 1 << 20


def test_planted_leaks_of_every_kind_are_found_with_their_lines(runtime) -> None:
    planted: dict[str, list[Any]] = collections.defaultdict(list)
    lines: dict[str, int] = {}
    array = np.zeros(MIB, "u1")
    with cumem.record() as rec:
        for _ in range(3):
            planted["pinned"].append(cumem.empty_pinned(1000, "u1")); lines["pinned"] = here()  # fmt: skip # noqa: E702, E501
            cumem.empty_pinned(2000, "u1")
        planted["mapped"].append(cumem.empty_mapped(1000, "u1")); lines["mapped"] = here()  # fmt: skip # noqa: E702, E501
        planted["managed"].append(cumem.empty_managed(1000, "u1")); lines["managed"] = here()  # fmt: skip # noqa: E702, E501
        planted["device"].append(cumem.empty_device(1000, "u1")); lines["device"] = here()  # fmt: skip # noqa: E702, E501
        planted["registered"].append(cumem.register(array)); lines["registered"] = here()  # fmt: skip # noqa: E702, E501
        cumem.copy(planted["device"][0], np.ones(1000, "u1"))
    leaks = rec.leaks()
    found = {int(g.name.rpartition(":")[2].split()[0]): g for g in leaks.groups}
    assert set(found) == set(lines.values())
    assert found[lines["pinned"]].living_count == 3
    assert found[lines["pinned"]].count == 3
    assert found[lines["registered"]].living_nbytes == MIB
    assert os.path.basename(__file__) in leaks.groups[0].name
    assert leaks.count == 7
    assert str(leaks).startswith("7 buffers left")
    planted.pop("registered")[0].close()
    planted.clear()


def test_peak_says_when_and_what_lived_then(runtime) -> None:
    pool, other = cumem.Pool("pinned"), cumem.Pool("mapped")
    with cumem.record() as rec:
        one = pool.allocate(4096); first = here()  # fmt: skip # noqa: E702
        two = other.allocate(8192); second = here()  # fmt: skip # noqa: E702
        del one
        pool.allocate(64)
        del two
    peak = rec.peak()
    assert peak.nbytes >= 4096 + 8192
    assert peak.kinds["pinned"] == 4096
    assert peak.kinds["mapped"] == 8192
    at = rows(rec.log, "allocate")[1]["time_ns"]
    assert peak.seconds == pytest.approx(at * 1e-9)
    names = [group.name for group in peak.groups]
    assert any(f":{second} " in name for name in names)
    assert any(f":{first} " in name for name in names)
    assert rec.summary().peak_nbytes == peak.nbytes
    pool.close()
    other.close()


def test_answers_of_nothing_are_said_plainly() -> None:
    with cumem.record() as rec:
        pass
    assert not rec.leaks()
    assert str(rec.leaks()) == "nothing is left"
    assert "0 events" in str(rec.summary())
    assert rec.peak().seconds == 0
    assert str(rec.top()).startswith("line")
    assert str(rec.diff(rec)) == "peak +0 B"
    with pytest.raises(ValueError, match="by must be"):
        rec.top("size")  # type: ignore[arg-type]


def test_answers_are_plain_data_and_readable(runtime) -> None:
    device = cumem.empty_device(MIB, "u1")
    with cumem.record() as rec:
        cumem.copy(device, np.ones(MIB, "u1"))
        keep = cumem.empty_pinned(100)
    answers = (rec.summary(), rec.leaks(), rec.top(), rec.top("tag"), rec.peak())
    for answer in (*answers, rec.diff(rec), cumem.live()):
        assert json.loads(json.dumps(answer.to_dict()))
        assert "nan" not in str(answer)
        assert str(answer)
    assert rec.summary().to_dict()["transfers"][0]["gbps"] > 0
    assert "pageable -> device" in str(rec.summary())
    del keep


def test_difference_names_the_lines_that_changed(runtime) -> None:
    pool = cumem.Pool("pinned")

    def work(count: int) -> list[Any]:
        same = [pool.allocate(64)]
        more = [pool.allocate(4096) for _ in range(count)]; work.line = here()  # fmt: skip # noqa: E702
        return same + more

    recs = []
    for count in (1, 3):
        with cumem.record() as rec:
            work(count)
        recs.append(rec)
    found = recs[1].diff(recs[0])
    (change,) = found.lines
    assert f":{work.line} " in change.name
    assert (change.count, change.peak_nbytes) == (2, 2 * 4096)
    assert found.peak_nbytes == 2 * 4096
    back = recs[0].diff(recs[1])
    assert back.lines[0].count == -2
    with pytest.raises(TypeError, match="before"):
        recs[0].diff(3)  # type: ignore[arg-type]
    pool.close()


def test_log_that_lost_frees_does_not_count_twice() -> None:
    """An address that is allocated again must have been freed, even if the record lost
    that event.
    """
    events = np.zeros(3, EVENT)
    events["address"] = (64, 64, 128)
    events["nbytes"] = 64
    events["op"] = [OPS.index(op) for op in ("allocate", "allocate", "free")]
    log = Log(events, np.zeros(0, EVENT), [()], ("",), {}, 5, 0.0, 10, {})
    from cumem.recording import summary

    assert summary.summarize(log).peak_nbytes == 64
    assert [g.peak_nbytes for g in summary.find_top(log, "kind").groups] == [64]
    leaks = summary.find_leaks(log)
    assert (leaks.count, leaks.nbytes) == (1, 64)
