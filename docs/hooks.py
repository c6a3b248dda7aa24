# SPDX-License-Identifier: Apache-2.0
"""What MkDocs does with these pages besides rendering them; `mkdocs.yml` names this file.

The pages are written to be read in the repository as well. So some parts of the site are
made from other files of the repository, and nothing is written twice:

- the start page is README.md, and notebooks/ become pages;
- the reference has a page for each section of docs/api.md that names public objects;
- docs/measured.md is followed by the tables of all sections called "Measured";
- links to files outside docs/ lead to copies of these.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = ROOT / "docs" / "decisions"
#: Files outside docs/ that become pages of the site, and the places of these pages.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "csrc/README.md": "csrc.md",
    "docs/decisions": "decisions/index.md",
    "notebooks": "notebooks/index.md",
}
#: Options of entries of the reference. The page of `Pool` shows the members of its base,
#: which is private and has no page.
OPTIONS = {"Pool": "\n    options:\n      inherited_members: true"}
#: By how much the search raises or lowers pages. For all other pages the factor is 1.
BOOST = {"how-to": 8.0, "tutorial": 2.0, "which-memory": 4.0, "synchronise": 3.0}
BOOST |= {"checkpoints": 3.0, "workers": 3.0, "training": 2.0, "memory-kinds": 2.0}
BOOST |= {"managed": 2.0, "pipelines": 2.0, "files": 2.0, "rows": 2.0}
BOOST |= {"changelog": 0.1, "decisions": 0.1, "csrc": 0.1, "contributing": 0.1}
BOOST |= {"measured": 0.3}
FENCE = re.compile(r"^(`{3,}).*?^\1$", re.S | re.M)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CELL = re.compile(r"<t[dh].*?</t[dh]>", re.S)
LONG = re.compile(r"<code>([^<]{16,})(?=</code>)")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# ---- links ------------------------------------------------------------------------------


def place_on_site(path: str) -> str:
    """Return the place on the site of a file or folder of the repository."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("notebooks/") and path.endswith((".ipynb", ".png")):
        return path.replace(".ipynb", ".md")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}"


def outside_fences(text: str) -> list[tuple[bool, str]]:
    """Cut a text at its fences, and return each piece with whether it is Markdown."""
    pieces, end = [], 0
    for fence in FENCE.finditer(text):
        pieces += [(True, text[end : fence.start()]), (False, fence[0])]
        end = fence.end()
    return [*pieces, (True, text[end:])]


def targets(text: str, origin: str) -> dict[str, str]:
    """Return the links of a page at `origin` to files and folders of the repository.

    The keys are the links as they are written, and the values are paths from the root.
    """
    found = {}
    for is_markdown, piece in outside_fences(text):
        for link in LINK.findall(piece) if is_markdown else ():
            path = link[1].partition("#")[0]
            if path and "://" not in path:
                joined = posixpath.join(posixpath.dirname(origin), path)
                found[link[1]] = posixpath.normpath(joined)
    return found


def with_links_of_site(text: str, origin: str, page: str) -> str:
    """Return the text of the file `origin` with the links that `page` of the site needs."""
    places = {
        link: posixpath.relpath(place_on_site(path), posixpath.dirname(page) or ".")
        for link, path in targets(text, origin).items()
    }

    def new(match: re.Match[str]) -> str:
        _, sign, anchor = match[2].partition("#")
        return f"{match[1]}{places.get(match[2], '')}{sign}{anchor}{match[3]}"

    return "".join(
        LINK.sub(lambda m: new(m) if m[2] in places else m[0], piece)
        if is_markdown
        else piece
        for is_markdown, piece in outside_fences(text)
    )


def with_titles(text: str) -> str:
    """Replace file names of pages, where links show them, by the titles of the pages."""

    def title(match: re.Match[str]) -> str:
        return f"[{read(f'docs/{match[1]}').partition(chr(10))[0].removeprefix('# ')}]("

    return re.sub(r"\[(?:docs/)?([\w-]+\.md)\]\(", title, text)


# ---- pages that are made ----------------------------------------------------------------


def sections(text: str) -> list[tuple[str, str]]:
    """Return the second-level headings of a page, each with the text below it."""
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def slug(title: str) -> str:
    """Return the name of a file for a title, which may be code."""
    return re.sub(r"[^\w\- ]", "", title.lower().replace(".", "-")).replace(" ", "-")


def reference() -> dict[str, tuple[str, str, list[str]]]:
    """Return the title, the introduction and the names of each page of the reference.

    A row of a table in docs/api.md explains the name with which it begins, unless it is a
    row of members.
    """
    pages = {}
    for title, text in sections(read("docs/api.md")):
        objects = re.split(
            r"^\| member of every buffer.*?\n\n", text, flags=re.S | re.M
        )
        module = re.fullmatch(r"`cumem\.(\w+)`", title)
        found = re.findall(r"^\| `([\w.]+)[`(]", "".join(objects), re.M)
        if module or title in ("Environment variables", "Command line"):
            found = [f"{module[1]}.{name}" for name in found] if module else []
        if found:
            above = re.sub(r"^\|.*\n", "", text, flags=re.M).strip()
            pages[f"reference/{slug(title)}.md"] = (title, above, found)
    return pages


def uses() -> dict[str, str]:
    """Return when to use each name, as the last column of its table in docs/api.md says."""
    found = {}
    for table in re.findall(r"(?:^\|.*\n)+", read("docs/api.md"), re.M):
        head, _, *rows = [
            [cell.strip() for cell in line.split(" | ")] for line in table.splitlines()
        ]
        asked = head[-1].removesuffix(" |")
        for row in rows:
            name = re.match(r"\| `([\w.]+)[`(]", row[0])
            if name and asked.endswith(" it when"):
                use = row[-1].removesuffix(" |")
                found[name[1]] = f"**{asked[0].upper()}{asked[1:]}** {use}."
    return found


def reference_page(title: str, above: str, names: list[str]) -> str:
    when = uses()
    entries = "\n\n".join(
        f"::: cumem.{name}{OPTIONS.get(name, '')}\n\n{when.get(name, '')}".rstrip()
        for name in names
    )
    return f"# {title}\n\n{above}\n\n{entries}\n"


def tables() -> str:
    """Collect tables and pictures of all sections "Measured", with their introductions."""
    lines = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        below = dict(sections(text)).get("Measured", "")
        below = re.sub(r"<!-- (/?)[\w-]+ -->", r"<!-- \1 -->", below)
        blocks = re.sub(r"<!--  -->\n\| figures \|.*?<!-- / -->", "", below, flags=re.S)
        found = [block.strip() for block in blocks.split("\n\n") if block.strip()]
        shown = {0} if found else set()
        for number, block in enumerate(found):
            if "| --- " in block or block.startswith(("![", "- ")):
                shown |= {number - 1, number} if number else {number}
        if found:
            name = text.partition("\n")[0].removeprefix("# ")
            lines += ["", f"## {name}", "", f"More on its page: [{name}]({path.name})."]
        for number in sorted(shown):
            lines += ["", found[number]]
    return "\n".join(lines) + "\n"


def decisions() -> str:
    lines = ["# Decisions", "", "Why cumem is as it is: one page each.", ""]
    for path in sorted(DECISIONS.glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def notebooks() -> dict[str, Any]:
    """Return the content of each notebook by its name."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def list_of_notebooks() -> str:
    lines = ["# Notebooks", "", "They run on a GPU and without one.", ""]
    for name, notebook in notebooks().items():
        title = "".join(notebook["cells"][0]["source"]).partition("\n")[0]
        lines.append(f"- [{title.removeprefix('# ')}]({name}.ipynb)")
    return "\n".join(lines) + "\n"


def notebook_page(name: str, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by their places on the site."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "text" if source.startswith("%") else "python"
        parts.append(f"```{language}\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                place = f"{name}-{len(pictures) + 1}.png"
                pictures[f"notebooks/{place}"] = b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above draws]({place})")
            elif "text/html" in data:
                parts.append(f"<div>\n{''.join(data['text/html'])}\n</div>")
            else:
                text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
                parts.append(f'<pre class="output">{html.escape(text)}</pre>')
    return "\n\n".join(parts) + "\n", pictures


# ---- what MkDocs calls ------------------------------------------------------------------


def made() -> dict[str, tuple[str, str]]:
    """Return the pages that are not in docs/, by their place on the site.

    For each there is the path from which its links count, and its Markdown.
    """
    pages = {"decisions/index.md": ("docs/decisions/index.md", decisions())}
    pages["notebooks/index.md"] = ("notebooks/index.md", list_of_notebooks())
    for path, place in ELSEWHERE.items():
        if path.endswith(".md"):
            pages[place] = (path, read(path))
    for place, page in reference().items():
        pages[place] = ("docs/api.md", reference_page(*page))
    for name, notebook in notebooks().items():
        path = f"notebooks/{name}.ipynb"
        pages[f"notebooks/{name}.md"] = (path, notebook_page(name, notebook)[0])
    return pages


def expanded(nav: list[Any]) -> list[Any]:
    """Replace each `folder/*` in the `nav` of mkdocs.yml by the pages of that folder."""
    pages = [*made(), *(f"decisions/{p.name}" for p in DECISIONS.glob("*.md"))]
    new: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            new.append(
                {k: expanded(v) if isinstance(v, list) else v for k, v in item.items()}
            )
        elif item.endswith("/*"):
            found = [p for p in pages if p.startswith(item[:-1])]
            found = [p for p in found if not p.endswith("/index.md")]
            new += found if item.startswith("reference") else sorted(found)
        else:
            new.append(item)
    return new


def on_config(config: Any) -> Any:
    config.nav = expanded(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made, the pictures of notebooks, and files that are linked."""
    from mkdocs.structure.files import File

    pages = made()
    origins = {place: origin for place, (origin, _) in pages.items()}
    for file in files.documentation_pages():
        origins[file.src_uri] = f"docs/{file.src_uri}"
        pages[file.src_uri] = (f"docs/{file.src_uri}", file.content_string)
    for place, (_, text) in pages.items():
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=text))
    for name, notebook in notebooks().items():
        for place, content in notebook_page(name, notebook)[1].items():
            files.append(File.generated(config, place, content=content))
    linked = {path for o, text in pages.values() for path in targets(text, o).values()}
    for path in sorted(linked):
        place = place_on_site(path)
        if place.startswith("repository/") and (ROOT / path).is_file():
            source = str(ROOT / path)
            files.append(File.generated(config, place, abs_src_path=source))
    config.extra["origins"] = origins
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links that fit the repository into links that fit the site."""
    place = page.file.src_uri
    first = place.partition("/")[0].removesuffix(".md")
    page.meta.setdefault("search", {})["boost"] = BOOST.get(first, 1.0)
    if place == "measured.md":
        markdown += tables()
    markdown = with_titles(markdown)
    return with_links_of_site(markdown, config.extra["origins"][place], place)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Let long calls in tables be broken at dots, brackets and underscores."""
    return CELL.sub(lambda cell: LONG.sub(broken, cell[0]), html)


def broken(code: re.Match[str]) -> str:
    places = r"(?<=\w)(?=\.[A-Za-z])|(?<=\w[(_])(?=\w)"
    return '<code class="long">' + re.sub(places, "<wbr>", code[1])


def on_post_build(config: Any) -> None:
    """Write the index of the search as a script too.

    A browser that shows the site from a folder can read no other form of it.
    """
    folder = Path(config.site_dir, "search")
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
