# SPDX-License-Identifier: Apache-2.0
"""Tests of docs/hooks.py, which turns the pages into those of the documentation site.

`make docs` builds the whole site. Here the functions of the hooks are called one by one, on
the pages of the tree or on short texts.
"""

from __future__ import annotations

import collections
import importlib.util
import re
from pathlib import Path

import pytest
from support.rules import check_none

import cumem
from cumem import types, units

# These tests read texts of the tree, which no version of Python changes.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
assert spec is not None
assert spec.loader is not None
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)


def explained() -> collections.Counter[str]:
    """Count in how many places of the reference each name is explained."""
    texts = [hooks.reference_page(*page) for page in hooks.reference().values()]
    found = [re.findall(r"^::: cumem\.(\S+)", text, re.M) for text in texts]
    return collections.Counter(name for names in found for name in names)


def test_each_public_name_is_on_one_page_of_the_reference() -> None:
    counts = explained()
    check_none(
        f"{name}: on {counts[name]}"
        for name in (*cumem.__all__, *(f"types.{name}" for name in types.__all__))
        if counts[name] != 1
    )


def test_page_of_each_public_name_says_when_to_use_it() -> None:
    uses = hooks.uses()
    check_none(
        sorted({*cumem.__all__} - uses.keys()), "docs/api.md says no use of these:"
    )
    pages = [hooks.reference_page(*page) for page in hooks.reference().values()]
    check_none(
        name
        for name, use in uses.items()
        if not any(f"::: cumem.{name}\n" in page and use in page for page in pages)
    )
    assert uses["copy"] == "**Use it when** the next line needs the data."


def test_reference_has_no_name_twice_and_no_members_of_buffers() -> None:
    counts = explained()
    check_none(name for name, count in counts.items() if count > 1)
    assert {f"units.{name}" for name in units.__all__} <= set(counts)
    assert not {"numpy", "to_numpy", "as_device"} & set(counts)


def test_each_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert len(pages) > 30
    check_none(name for name in pages if not re.search(rf"\b{name}$", text, re.M))


@pytest.mark.parametrize(
    ("link", "origin", "page", "expected"),
    [
        ("copies.md#fill", "docs/files.md", "files.md", "copies.md#fill"),
        ("docs/copies.md", "README.md", "index.md", "copies.md"),
        ("../README.md#test", "docs/files.md", "files.md", "index.md#test"),
        (
            "../copies.md",
            "docs/decisions/0001-x.md",
            "decisions/0001-x.md",
            "../copies.md",
        ),
        ("copies.md", "docs/api.md", "reference/copying.md", "../copies.md"),
        ("docs/decisions/", "README.md", "index.md", "decisions/index.md"),
        ("2-x.ipynb", "notebooks/1-y.ipynb", "notebooks/1-y.md", "2-x.md"),
        ("1-y-1.png", "notebooks/1-y.ipynb", "notebooks/1-y.md", "1-y-1.png"),
        (
            "../benchmarks/results/files-h200.json",
            *("docs/files.md", "files.md"),
            "repository/benchmarks/results/files-h200.json",
        ),
        (
            "../../tests/conftest.py",
            *("docs/decisions/0001-x.md", "decisions/0001-x.md"),
            "../repository/tests/conftest.py",
        ),
        ("https://example.org/a.md", "docs/files.md", "files.md", None),
        ("#measured", "docs/files.md", "files.md", None),
    ],
)
def test_links_of_the_repository_become_those_of_the_site(
    link, origin, page, expected
) -> None:
    made = hooks.with_links_of_site(f"a [b]({link}) c", origin, page)
    assert made == f"a [b]({expected or link}) c"


def test_links_that_show_a_file_show_its_title() -> None:
    made = hooks.with_titles("see [copies.md](copies.md) and [this](pools.md)")
    assert made == "see [Copies](copies.md) and [this](pools.md)"


def test_code_that_looks_like_a_link_is_kept() -> None:
    text = "[a](docs/x.md)\n\n```python\nf[a](docs/x.md)\n```\n"
    made = hooks.with_links_of_site(text, "README.md", "index.md")
    assert made == "[a](x.md)\n\n```python\nf[a](docs/x.md)\n```\n"


def test_comparisons_have_the_tables_of_the_pages_and_not_their_machines() -> None:
    """The page of comparisons repeats tables of figures, without those of commits."""
    text = hooks.tables()
    assert "| array → device, 1 GiB |" in text  # a table of copies.md
    assert "| host → device |" in text  # a table of memory-kinds.md, between markers
    assert "| figures | commit |" not in text


def test_long_calls_in_tables_may_be_broken() -> None:
    text = "<td><code>torch.cuda.set_device(index=0.5)</code> <code>a.b(c)</code></td>"
    made = hooks.on_page_content(text + "<p><code>torch.cuda.x</code></p>", *[None] * 3)
    long = "torch<wbr>.cuda<wbr>.set_<wbr>device(<wbr>index=0.5)"
    assert f'<td><code class="long">{long}</code> <code>a.b(c)</code></td>' in made
    assert made.endswith("<p><code>torch.cuda.x</code></p>")


def test_notebook_becomes_a_page_with_its_outputs() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "b"]},
        {
            "cell_type": "code",
            "source": "f(1)",
            "outputs": [
                {"output_type": "stream", "text": "1 < 2\n"},
                {"data": {"image/png": "aGk="}},
            ],
        },
    ]
    text, pictures = hooks.notebook_page("n", {"cells": cells})
    assert text.startswith("# A\nb\n\n```python\nf(1)\n```\n")
    assert '<pre class="output">1 &lt; 2</pre>' in text
    assert "(n-1.png)" in text
    assert pictures == {"notebooks/n-1.png": b"hi"}


#: Words that somebody might search for, and the page to which the answer leads.
TASKS = {
    "pin batch copy asynchronously": "copies.md",
    "load checkpoint": "checkpoints.md",
    "data larger than GPU": "pipelines.md",
    "rows index": "rows.md",
    "swap blocks": "rows.md",
    "pool PyTorch": "pytorch.md",
    "memory leak": "pools.md",
    "NumPy array full speed": "copies.md",
    "copies slow": "doctor.md",
    "pool CuPy": "allocators.md",
    "DataLoader multiprocessing": "workers.md",
    "how much held": "pools.md",
    "choose kind memory": "which-memory.md",
    "wait copy": "synchronise.md",
    "fork workers": "workers.md",
    "limit memory": "pools.md",
    "read file GPU": "files.md",
    "several GPUs": "several-gpus.md",
    "managed unified memory": "managed.md",
    "zero-copy": "computing.md",
    "running out of memory": "offloading.md",
}


@pytest.mark.parametrize("words", TASKS)
def test_a_task_has_a_heading_with_its_words_and_leads_on(words: str) -> None:
    text = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    found = [
        below
        for title, below in hooks.sections(text)
        if all(word.lower() in title.lower() for word in words.split())
    ]
    assert len(found) == 1
    assert f"({TASKS[words]}" in found[0]
