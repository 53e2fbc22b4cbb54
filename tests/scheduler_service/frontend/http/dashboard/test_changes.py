"""The changes from view to view add up to the last view."""

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagewire.columns import pack
from scheduler_service.columns import from_column
from scheduler_service.frontend.http.dashboard.view import View, changes

SCALARS = st.one_of(st.integers(-3, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2)))
FACTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=1),
    st.recursive(
        SCALARS,
        lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=1), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)
COLUMNS = st.lists(st.integers(-1, 3), max_size=12).map(lambda v: np.array(v, np.int32))
TABLES = st.lists(st.lists(st.integers(0, 9), max_size=6).map(pack), min_size=1, max_size=3)
VIEWS = st.builds(
    View,
    FACTS,
    st.dictionaries(st.sampled_from(["g/gpu/owners", "g/cpu/owners"]), COLUMNS),
    st.dictionaries(st.sampled_from(["1/gpu", "2/gpu"]), TABLES),
)


def patched(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result


class Page:
    """What the page's `view.js` does."""

    def __init__(self) -> None:
        self.facts: Any = {}
        self.columns: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}

    def apply(self, message: Any) -> None:
        message = json.loads(json.dumps(message))
        self.facts = patched(self.facts, message.get("facts", {}))
        for name, coded in message.get("columns", {}).items():
            if coded is None:
                del self.columns[name]
                continue
            column = self.columns.get(name, [])
            if len(column) != coded[0]:
                column = [0] * coded[0]
            for start, count, value in zip(coded[1::3], coded[2::3], coded[3::3], strict=True):
                column[start : start + count] = [value] * count
            self.columns[name] = column
        for name, tables in message.get("tables", {}).items():
            if tables is None:
                del self.tables[name]
                continue
            old = self.tables.get(name, [])
            old = [*old, *[[]] * len(tables)]
            self.tables[name] = [[*old[i][:keep], *rest] for i, (keep, *rest) in enumerate(tables)]


@given(st.lists(VIEWS, min_size=1, max_size=5))
def test_changes_one_after_another_lead_to_the_last_view(views: list[View]) -> None:
    page, before = Page(), View()
    for view in views:
        page.apply(changes(before, view))
        before = view
        assert page.facts == view.facts
        assert page.columns == {name: c.tolist() for name, c in view.columns.items()}
        assert page.tables == {
            name: [from_column(table, name) for table in tables]
            for name, tables in view.tables.items()
        }


def test_what_stays_is_not_told() -> None:
    column = np.array([1, 1, 2], np.int32)
    view = View({"a": {"b": 1, "c": [1]}}, {"g": column}, {"1": [pack([4, 5])]})
    assert changes(view, view) == {}
    later = View({"a": {"b": 2, "c": [1]}}, {"g": column}, {"1": [pack([4, 5, 6])]})
    assert changes(view, later) == {"facts": {"a": {"b": 2}}, "tables": {"1": [[2, 6]]}}
