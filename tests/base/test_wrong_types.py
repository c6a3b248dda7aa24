# SPDX-License-Identifier: Apache-2.0
"""No callable of the extension crashes if it gets arguments of wrong types."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import programs

# A build with checks notices an invariant that no longer holds.
pytestmark = pytest.mark.checked

SCRIPT = Path(__file__).parents[1] / "isolated" / "wrong_types.py"
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_wrong_types_given_to_every_callable_of_the_extension_crash_nothing(
    part: int, tmp_path: Path
) -> None:
    last = tmp_path / "last"
    last.touch()
    done = programs.run(
        *(str(SCRIPT), str(part), str(PARTS), str(last), str(tmp_path)),
        # With these variables freed memory is overwritten, so that a later use is noticed.
        PYTHONMALLOC="malloc",
        MALLOC_PERTURB_="165",
    )
    said = f"{last.read_text().strip()}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    assert "tried " in done.stderr, said
