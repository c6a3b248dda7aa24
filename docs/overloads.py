# SPDX-License-Identifier: Apache-2.0
"""Shows in the reference what a stub has as overloads alone; `mkdocs.yml` names this file.

The stub of the extension has no body for a function with overloads. mkdocstrings knows a
function by its body, so the last overload stands for it, which has the signature of all
and the docstring.
"""

from __future__ import annotations

from typing import Any

import griffe


class LastOverload(griffe.Extension):
    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        for name, functions in mod.overloads.items():
            if functions and name not in mod.members:
                mod.set_member(name, functions[-1])
