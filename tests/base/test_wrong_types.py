# SPDX-License-Identifier: Apache-2.0
"""Every callable of the extension with arguments of wrong types: none of them crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import programs

# A build with checks sees invariants that no longer hold.
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
        # memory that is given back changes, so that what is used after its end is seen
        PYTHONMALLOC="malloc",
        MALLOC_PERTURB_="165",
    )
    said = f"{last.read_text().strip()}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    assert "tried " in done.stderr, said
