# SPDX-License-Identifier: Apache-2.0
"""Tests of the structure of the sources, by measures whose figures may only fall.

tests/support/structure.py has the measures, and tests/debts.toml the figure that each may
have today. The first tests compare them and check rules that have no figure. The later ones
test the measures themselves on short texts.
"""

from __future__ import annotations

import ast
import re
import subprocess
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
from support import structure
from support.rules import check_none
from support.structure import Debt

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.skipif(
        not structure.CSRC.is_dir(), reason="the C sources are not beside the tests"
    ),
]


@pytest.fixture(scope="module")
def debts() -> dict[str, Debt]:
    """Read tests/debts.toml."""
    return structure.read_debts(structure.DEBTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", structure.MEASURES)
def test_structure_owes_what_its_debt_says_and_no_more(debts, name: str) -> None:
    assert name in debts, (
        f"write [{name}] with `today` and `goal` into tests/debts.toml"
    )
    said = structure.judge(name, structure.MEASURES[name](), debts[name])
    assert said is None, said


def test_every_debt_has_a_measure_and_a_goal_that_is_no_higher(debts) -> None:
    measures = {*structure.MEASURES, *structure.TRACED}
    check_none(
        set(debts) - measures, "take these debts out, since no measure has them:"
    )
    check_none(f"{n}: {d}" for n, d in debts.items() if not 0 <= d.goal <= d.today)


def test_debts_rise_only_with_a_reason() -> None:
    """Each version of tests/debts.toml in the history is compared with the one before."""
    path = structure.DEBTS.relative_to(structure.ROOT).as_posix()

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(structure.ROOT), *command], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip("there is no history of commits beside the tests")
        return done.stdout

    commits = git("log", "--first-parent", "--format=%H", "--", path).split()
    versions = [git("show", f"{commit}:{path}") for commit in reversed(commits)]
    versions.append(structure.DEBTS.read_text(encoding="utf-8"))
    rises = [
        rise
        for before, after in pairwise(map(structure.read_debts, versions))
        for rise in structure.rises(before, after)
    ]
    check_none(
        set(rises) - structure.read_reasons(versions[-1]),
        "say why these rose, as [[raised]] with name, today and why in tests/debts.toml:",
    )


def test_every_function_that_c_calls_is_named_by_texts_and_exists() -> None:
    """Names that a macro makes are followed. A name that is made at run time is refused."""
    named = structure.named_functions()
    assert len(named) > 20
    check_none(
        f"{place}: {function}"
        for function, place in named
        if not structure.exists(function)
    )


def test_every_function_that_c_may_call_for_words_is_called() -> None:
    shorts = {
        ".".join(each.function.split(".")[-2:]) for each in structure.named_functions()
    }
    check_none(
        (
            pattern
            for patterns in structure.WORDS.values()
            for pattern in patterns
            if not any(fnmatchcase(short, pattern) for short in shorts)
        ),
        "take these out of WORDS in tests/support/structure.py, since C calls none:",
    )


def test_every_module_is_in_the_folder_of_a_room() -> None:
    check_none(
        (name for name in structure.modules() if structure.room_of(name) is None),
        "put these into the folder of a room (docs/decisions/0019-words-not-work.md):",
    )
    folders = {path.parent.name for path in structure.PACKAGE.glob("*/__init__.py")}
    assert folders == set(structure.ROOMS) - {"face"}


def test_modules_that_the_docs_import_are_the_public_ones() -> None:
    pages = [structure.ROOT / "README.md", *(structure.ROOT / "docs").glob("*.md")]
    imported = {
        name
        for page in pages
        for name in re.findall(r"(?:import|from) (cumem[a-z_.]*)", page.read_text())
    }
    check_none(
        imported - set(structure.PUBLIC_MODULES),
        "put these into PUBLIC_MODULES of tests/support/structure.py:",
    )


def test_settings_of_copies_that_stay_have_a_figure() -> None:
    shown = structure.SHOWN_SETTINGS
    assert len(shown) <= 3
    results = structure.ROOT / "benchmarks" / "results"
    check_none(name for name in shown.values() if not (results / name).is_file())


# -- the measures themselves -----------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("x = a ? b : c;", 0),
        ("x = a ? b : c ? d : e;", 1),
        ("x = a ? b ? c : d : e;", 1),
        ("x = a ? (b ? c : d) : e;", 1),
        ("x = a ? (int)(b ? c : d) : e;", 1),
        ("x = (a ? b : c) ? d : e;", 1),
        ("x = a == (b ? c : d) ? e : f;", 1),
        ("x = a ? 1 + (b ? c : d) : e;", 1),
        ("x = a ? b : c ? d : e ? f : g;", 2),
        ("x = a ? f(b ? c : d) : e;", 0),
        ("x = f(b ? c : d) ? a : e;", 0),
        ("x = a ? m[b ? c : d] : e;", 0),
        ("x = f(a ? b : c, d ? e : f);", 0),
        ("x = a ? b : c; y = d ? e : f;", 0),
        ("x = {a ? b : c, d ? e : f};", 0),
        ("if (a ? b : c) { x = d ? e : f; }", 0),
        ("if (a ? b : c) return d ? e : f;", 0),
        ("switch (a) { case 1: return b ? c : d; default: return e ? f : g; }", 0),
        ("return (a ? b : c);", 0),
        ('x = a ? "b ? c : d" : e;', 0),
        ("x = a ? b /* ? c : d */ : e;", 0),
    ],
)
def test_conditionals_in_operands_of_another_are_counted(code: str, count: int) -> None:
    assert len(structure.nested_conditionals(structure.code_of(code))) == count


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("return a() < 0 || b() < 0 ? -1 : 0;", 1),
        ("return a && b ? 0 : -1;", 1),
        ("return a ? -1 : 0;", 0),
        ("x = a || b; return c ? -1 : 0;", 0),
        ("if (a || b) { return c ? -1 : 0; }", 0),
        ("return a || b ? -1 : 01;", 0),
    ],
)
def test_chains_that_end_in_a_status_are_counted(code: str, count: int) -> None:
    assert len(structure.chained_statuses(code)) == count


def test_lines_of_code_stay_where_they_were() -> None:
    text = '/* a\n? b\n: c */ x = a ? "\\"?" : \'?\';\n// d ? e\ny = f ? g : h ? i : j;'
    code = structure.code_of(text)
    assert code.count("\n") == text.count("\n")
    assert structure.nested_conditionals(code) == [5]
    assert '"\\"?"' in structure.code_of(text, keep_texts=True)


def test_functions_that_macros_name_are_found() -> None:
    shared = structure.macros_of(
        "#define LIST(X) X(one) X(two)\n"
        "#define PACKAGED(type, module, name) \\\n"
        "    static f type##_##name(a) { return cm_package_method(module, #name, a); }\n"
    )
    text = '#define EACH(name) PACKAGED(Buffer, "views", name)\nLIST(EACH)\n'
    macros = shared | structure.macros_of(text)
    expanded = structure.expand(
        structure.DEFINE.sub("", text), macros, hidden=frozenset()
    )
    assert list(structure.names_in(expanded)) == ["views.one", "views.two"]
    assert "Buffer_one(a)" in expanded


def test_function_whose_name_is_not_a_text_is_reported() -> None:
    call = 'cm_package_call(which ? "a" : "b", "c", PyTuple_Pack(1, object))'
    assert list(structure.names_in(call)) == ['?.which ? "a" : "b", "c"']
    assert not structure.exists('?.which ? "a" : "b", "c"')


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("if (plan->row->uses_ring) {", False),
        ("return job->plan.row == NULL;", False),
        ("ticket->row = job->plan.row;", False),
        ("plan->row = &cm_routes[CM_ROUTE_HOST];", True),
        ("job->plan.row == other", True),
        ("NULL != plan.row && plan.row != first", True),
        ("strcmp(plan->row->text, name)", True),
        ("info.route", True),
    ],
)
def test_route_that_is_asked_for_is_seen_in_any_spelling(code: str, asks: bool) -> None:
    assert (structure.ROUTE_ASKED.search(code) is not None) == asks


#: The files that make plans: of a region, of many runs, of a file, and for explain().
PLANNERS = {
    *("transfer/plan/plan.c", "transfer/routes/pieces.c", "transfer/file/file.c"),
    "transfer/run/explain.c",
}


def test_route_of_a_plan_is_set_where_plans_are_made_and_nowhere_else() -> None:
    sets = re.compile(r"\bplan(?:->|\.)row\s*=(?!=)|\(cm_plan\)\s*\{\s*\.row\s*=")
    found = {path for path, code in structure.c_codes().items() if sets.search(code)}
    assert found == PLANNERS


def test_circles_and_arrows_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}
    assert structure.components(graph) == [{"b", "c"}, {"d"}]
    assert structure.room_of("units") == "face"
    assert structure.room_of("base.units") == "base"
    assert structure.room_of("recording.record") == "recording"
    assert structure.room_of("nowhere") is None
    assert "base.units" in structure.arrows()["transfers.tuning"]
    within_a_function = "pools.statistics"
    assert within_a_function in structure.arrows()["pools.pool"]


@pytest.mark.parametrize(
    ("answer", "is_bare"),
    [
        ("Any", True),
        ("object", True),
        ("dict[str, Any]", True),
        ("tuple[int, int, int]", True),
        ("list[tuple[str, tuple[int, int, int]]]", True),
        ("tuple[int, int]", False),
        ("tuple[int, ...]", False),
        ("np.dtype[Any]", False),
        ("Buffer | NDArray[Any] | np.ndarray[Any, Any]", False),
        ("list[_LivingBlock]", False),
    ],
)
def test_answers_without_names_are_reported(answer: str, is_bare: bool) -> None:
    function = ast.parse(f"def _ask() -> {answer}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert bool(structure.bare_reasons(function)) is is_bare


def test_calls_back_are_found_through_other_functions() -> None:
    start = structure.Function("base.driver", "driver_version")
    assert "base.driver.driver_version: _core._driver_version" in (
        structure.core_calls(start)
    )
    reached = structure.reached_from([structure.Function("devices.device", "make")])
    assert structure.Function("devices.device", "make") in reached


@pytest.mark.parametrize(
    ("figure", "debt", "said"),
    [
        (3, Debt(3, 0), None),
        (4, Debt(3, 0), "x is 4, which is 1 more than the debt"),
        (2, Debt(3, 0), "write `today = 2` under [x]"),
        (1, Debt(3, 2), "write `today = 2` under [x]"),
        (1, Debt(2, 2), None),
        (3, Debt(2, 2), "x is 3, which is 1 more than the debt"),
    ],
)
def test_figure_is_compared_with_its_debt(figure: int, debt: Debt, said: str | None):
    found = structure.judge("x", ["csrc/a.c:1"] * figure, debt)
    assert (found is None) if said is None else (said in (found or ""))


def test_debts_are_lowered_in_place_and_never_raised() -> None:
    text = "# why\n[a]\ntoday = 5\ngoal = 2\n\n# b\n[b]\ntoday = 7\ngoal = 0\n"
    made = structure.lowered(text, {"a": 1, "b": 9})
    assert structure.read_debts(made) == {"a": Debt(2, 2), "b": Debt(7, 0)}
    assert made == text.replace("today = 5", "today = 2")


def test_debts_that_rise_are_distinguished_from_those_that_fall() -> None:
    before = {"a": Debt(5, 2), "b": Debt(5, 2), "c": Debt(5, 2)}
    after = {"a": Debt(6, 2), "b": Debt(4, 2), "d": Debt(9, 0)}
    assert structure.rises(before, after) == [("a", 6)]
    text = '[[raised]]\nname = "a"\ntoday = 6\nwhy = "a new name"\n'
    assert structure.read_reasons(text) == {("a", 6)}
