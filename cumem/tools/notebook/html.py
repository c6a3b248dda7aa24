# SPDX-License-Identifier: Apache-2.0
"""Makes the tables, bars and maps of displays in notebooks, as HTML and SVG.

Text and lines take the colour of the page around them, so that they are readable on a
light page and on a dark one, whatever the system prefers. JupyterLab's own variables take
precedence where they exist. A display loads nothing, and all text in it is escaped.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from cumem import _core
from cumem.base.colours import KIND_COLOURS, STATE_COLOURS
from cumem.base.units import format_nbytes, format_rate, format_seconds

_STYLE: Final = """
.cumem{--cm-line:var(--jp-border-color1,color-mix(in srgb,currentColor 25%,transparent));
--cm-soft:var(--jp-layout-color2,color-mix(in srgb,currentColor 8%,transparent));
--cm-dim:var(--jp-content-font-color2,color-mix(in srgb,currentColor 70%,transparent));
font:13px/1.45 var(--jp-content-font-family,system-ui,sans-serif);max-width:100%;
overflow-x:auto;padding:2px 0}
.cumem .cm-head{font-weight:600;margin:0 0 4px}
.cumem .cm-badge{font-weight:400;font-size:11px;border:1px solid currentColor;
border-radius:8px;padding:0 6px;margin-left:6px;color:var(--cm-dim)}
.cumem .cm-note{color:var(--cm-dim);margin:4px 0 0;max-width:72em}
.cumem .cm-alert{border-left:3px solid #d55e00;padding:2px 0 2px 8px;margin:4px 0;
max-width:72em}
.cumem table{border-collapse:collapse;margin:4px 0;color:inherit;font:inherit;border:0;
display:table;width:auto}
.cumem tr,.cumem tr:nth-child(even){background:none}
.cumem th,.cumem td{padding:2px 10px 2px 0;text-align:left;vertical-align:top;border:0;
border-bottom:1px solid var(--cm-line);background:none;color:inherit;max-width:48em;
overflow-wrap:anywhere}
.cumem th{font-weight:600;color:var(--cm-dim);white-space:nowrap}
.cumem .cm-n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.cumem td:first-child{white-space:nowrap}
.cumem tr.cm-sum td{font-weight:600}
.cumem code,.cumem pre{font-family:var(--jp-code-font-family,ui-monospace,monospace);
font-size:12px;background:none;color:inherit;padding:0;border:0}
.cumem .cm-key{display:inline-block;width:10px;height:10px;margin:0 4px 0 0;
border:1px solid var(--cm-line)}
.cumem .cm-keys span{margin-right:12px;white-space:nowrap}
.cumem svg{display:block;max-width:100%;height:auto;overflow:visible;margin:4px 0}
.cumem svg text{fill:currentColor;font:11px var(--jp-content-font-family,system-ui,
sans-serif)}
.cumem td svg{max-width:none}
.cumem .cm-cells{display:flex;flex-wrap:wrap;gap:0 32px}
.cumem summary{cursor:pointer;color:var(--cm-dim)}
""".replace("\n", "").replace(".cumem", ".cumem" * 3)  # overrides the notebook's rules

#: Matches cells that are right-aligned: numbers, with or without a unit.
_NUMBER: Final = re.compile(
    r"[-+]?[\d.,]+( ?([KMGTPE]i?B|B|GB|MB|KB|[nµm]?s)(/s)?|%)?|-|"
)


class Raw(str):
    """HTML that must not be escaped again."""

    __slots__ = ()


def escape(text: object) -> Raw:
    """Escape text for a page; `Raw` stays as it is."""
    return text if isinstance(text, Raw) else Raw(html.escape(str(text)))


def page(title: object, *parts: str, note: object = "") -> str:
    """Make a display of the present devices, real or emulated; see `page_of`."""
    return page_of(_core._is_emulated(), title, *parts, note=note)


def page_of(emulated: bool, title: object, *parts: str, note: object = "") -> str:
    """Make a display from a title, parts and a note, marked if devices are emulated.

    Parameters
    ----------
    emulated : bool
        Whether to mark the display as one of emulated devices.
    title, note : str
        Text, or `Raw`.
    *parts : str
        HTML from the other functions here.
    """
    badge = '<span class="cm-badge">emulated</span>' if emulated else ""
    head = f'<div class="cm-head">{escape(title)}{badge}</div>'
    end = f'<div class="cm-note">{escape(note)}</div>' if note else ""
    body = "".join(parts)
    return f'<div class="cumem"><style>{_STYLE}</style>{head}{body}{end}</div>'


def alert(text: object) -> Raw:
    """Make a line that stands out, for a warning."""
    return Raw(f'<div class="cm-alert">{escape(text)}</div>')


def facts(pairs: Iterable[tuple[str, object]]) -> Raw:
    """Make a table of names and values, with a line for each pair."""
    lines = (
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in pairs
    )
    return Raw(f"<table>{''.join(lines)}</table>")


def _head(title: object) -> Raw:
    return Raw(f'<div class="cm-head">{escape(title)}</div>')


def table(
    title: object,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    note: object = "",
    sums: int = 0,
) -> Raw:
    """Make a table, in which columns of numbers are right-aligned.

    Without rows, there is no header either.

    Parameters
    ----------
    title, note : str
        Texts above and below, which may be empty.
    columns : sequence of str
        The names of the columns.
    rows : iterable of sequence of str
        The cells of each row, one for each column, as text or `Raw`.
    sums : int
        How many of the last rows are sums.
    """
    lines = [[escape(cell) for cell in row] for row in rows]
    right = [
        all(_NUMBER.fullmatch(row[i]) for row in lines)
        and any(row[i].strip("-") for row in lines)
        for i in range(len(columns))
    ]
    marks = [' class="cm-n"' if each else "" for each in right]

    def line(cells: Iterable[object], tag: str, mark: str = "") -> str:
        made = (
            f"<{tag}{where}>{escape(cell)}</{tag}>"
            for where, cell in zip(marks, cells, strict=True)
        )
        return f"<tr{mark}>{''.join(made)}</tr>"

    body = [
        line(row, "td", ' class="cm-sum"' if i >= len(lines) - sums else "")
        for i, row in enumerate(lines)
    ]
    head = _head(title) if title else ""
    end = f'<div class="cm-note">{escape(note)}</div>' if note else ""
    if not lines:
        return Raw(head + end)
    return Raw(
        f"{head}<table><thead>{line(columns, 'th')}</thead>"
        f"<tbody>{''.join(body)}</tbody></table>{end}"
    )


def beside(parts: Iterable[str]) -> Raw:
    """Put parts side by side, as many as fit in a line."""
    return Raw(
        f'<div class="cm-cells">{"".join(f"<div>{each}</div>" for each in parts)}</div>'
    )


def details(summary: object, content: str) -> Raw:
    """Make a part that opens when somebody clicks on its summary."""
    return Raw(f"<details><summary>{escape(summary)}</summary>{content}</details>")


# -- pictures --------------------------------------------------------------------------


class Part(NamedTuple):
    """A piece of a bar."""

    name: str
    nbytes: int
    colour: str  #: "" for a piece without colour, such as free memory


def keys(colours: Mapping[str, str]) -> Raw:
    """Make a legend of names and colours."""
    spans = (
        f'<span><i class="cm-key" style="background:{colour or "none"}"></i>'
        f"{escape(name)}</span>"
        for name, colour in colours.items()
    )
    return Raw(f'<div class="cm-keys">{"".join(spans)}</div>')


def key(kind: str, text: object = "") -> Raw:
    """Make the name of a kind of memory, with its colour in front."""
    colour = KIND_COLOURS.get(kind, "none")
    mark = f'<i class="cm-key" style="background:{colour}"></i>'
    return Raw(f"{mark}{escape(text or kind)}")


def rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    """Draw a rectangle with a tooltip; without a colour it is only an outline."""
    edge = 'stroke="#fff" stroke-opacity=".6"' if colour else 'stroke="currentColor"'
    edge += "" if colour else ' stroke-opacity=".3"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
        f'height="{height:.1f}" fill="{colour or "none"}" {edge} stroke-width=".5">'
        f"{title}</rect>"
    )


def svg(width: float, height: float, shapes: Iterable[str], label: str) -> Raw:
    """Draw a picture; screen readers read the label."""
    return Raw(
        f'<svg width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg>"
    )


def bar(parts: Sequence[Part], total: int = 0, width: int = 360) -> Raw:
    """Draw parts of a whole side by side; `total` may be more than their sum."""
    whole = max(total, sum(part.nbytes for part in parts), 1)
    shapes, x = [], 0.0
    for part in parts:
        if part.nbytes > 0:
            wide = width * part.nbytes / whole
            tip = f"{part.name}: {format_nbytes(part.nbytes)}"
            shapes.append(rect(x, 1, wide, 12, part.colour, tip))
            x += wide
    shapes.append(rect(0, 1, width, 12, "", ""))
    said = ", ".join(f"{part.name} {format_nbytes(part.nbytes)}" for part in parts)
    return svg(width, 14, shapes, f"{said} of {format_nbytes(whole)}")


def parts_of(live: int, in_flight: int, cached: int) -> list[Part]:
    """Return the parts of the bar of a pool."""
    values = {"live": live, "in flight": in_flight, "cached": cached}
    return [Part(name, nbytes, STATE_COLOURS[name]) for name, nbytes in values.items()]


def legend(parts: Sequence[Part]) -> Raw:
    """Make the legend of a bar, with the sizes of its parts but without empty ones."""
    shown = [part for part in parts if part.nbytes > 0]
    return keys({f"{p.name} {format_nbytes(p.nbytes)}": p.colour for p in shown})


# -- any answer ------------------------------------------------------------------------

_MOST_ROWS: Final = 50
_FEW: Final = 12  # the most values that are shown before somebody clicks
_NAMES: Final = {"nbytes": "size", "seconds": "time", "gbps": "rate"}


def answer(thing: Any) -> str:
    """Show anything that has ``to_dict()``, with its lists of answers as tables."""
    kind = type(thing)
    place = "cumem.types" if kind.__module__ == "cumem.types" else "cumem"
    return page(f"{place}.{kind.__name__}", data(thing.to_dict()))


def data(values: Mapping[str, Any]) -> Raw:
    """Show plain data; nested data follow it, with their keys as titles."""
    flat = [(_name(k), value(k, v)) for k, v in values.items() if not _is_nested(v)]
    parts = [facts(flat)] if flat else []
    for key, inner in values.items():
        if isinstance(inner, Mapping) and inner:
            shown = data(inner)
            few = len(inner) <= _FEW and not any(map(_is_nested, inner.values()))
            title = _name(key)
            parts.append(Raw(_head(title) + shown) if few else details(title, shown))
        elif _is_nested(inner):
            parts.append(_listed(_name(key), inner))
    return Raw("".join(parts))


def _listed(title: str, items: Sequence[Any]) -> Raw:
    """Make a table of dicts with the same keys, leaving out nested values."""
    columns = [
        key
        for key in dict.fromkeys(key for item in items for key in item)
        if not any(
            isinstance(item.get(key), Mapping) or _is_nested(item.get(key))
            for item in items
        )
    ]
    shown = [
        [_marked(value(column, item.get(column))) for column in columns]
        for item in items[:_MOST_ROWS]
    ]
    more = len(items) - len(shown)
    note = f"and {more} more" if more else ""
    return table(title, [*map(_name, columns)], shown, note)


def _marked(cell: str) -> str:
    return key(cell) if cell in KIND_COLOURS else cell


def _is_nested(item: Any) -> bool:
    if isinstance(item, Mapping):
        return bool(item)
    return (
        isinstance(item, (list, tuple))
        and bool(item)
        and all(isinstance(each, Mapping) for each in item)
    )


def _name(key: str) -> str:
    for unit in ("_nbytes", "_seconds", "_ns"):
        key = key.removesuffix(unit)
    return _NAMES.get(key) or key.replace("_", " ")


def in_cell(line: str) -> str:
    """Return ``"In[3]:2 (f)"`` for a line of a notebook's cell, whose file is IPython's."""
    file, colon, place = line.rpartition(":")
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None or not colon else ipython.get_ipython()
    found = None if shell is None else shell.compile.format_code_name(file)
    return line if found is None else f"{found[1]}:{place}"


def value(key: str, item: Any) -> str:
    """Format a value with the unit that its key names."""
    if item is None or item == "":
        return "-"
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, (int, float)):
        # A key such as "pinned" names a sum of bytes, but "device" is a device's number.
        is_sum = key in KIND_COLOURS and key != "device"
        if isinstance(item, int) and (key.endswith("nbytes") or is_sum):
            return format_nbytes(item)
        if key.endswith("_ns") and item >= 0:
            return format_seconds(item * 1e-9)
        if key.endswith("seconds") and item >= 0:
            return format_seconds(item)
        if key == "gbps":
            return format_rate(item * 1e9, 1.0)
        if key == "fragmentation":
            return f"{item:.0%}"
        if key.endswith("address"):
            return f"0x{item:x}"
    if isinstance(item, (list, tuple)):
        return ", ".join(value(key, each) for each in item) or "-"
    return str(item) if isinstance(item, Mapping) else in_cell(str(item))
