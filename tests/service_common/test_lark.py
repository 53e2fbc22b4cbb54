"""Grammars in GBNF, and keywords of JSON schemas that exclude nothing."""

from typing import Any

import pytest

from service_common.lark import effective, from_gbnf
from tests.support.json_schemas import allows

JSON = r"""# a value
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws (
    value
    ("," ws value)*
  )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
QUERY = """root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (JSON, ['{"a": [1, -2.5e3, "x\\n\\u00e9\u00e9", {}, null]}', "{}"], ["[]", '{"a": nul}']),
        (QUERY, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3 "]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["ab"]),
        ("root ::= [\u0430-\u044f]{2,}", ["\u0430\u0431\u0432"], ["\u0430", "ab"]),
        ('root ::= word (" " word)* "."\r\nword ::= [a-z]+', ["ab cd."], ["ab", "."]),
        ('  root\t::= [^\\n]+ "\\n"', ["h\u00e9\n"], ["\n"]),
    ],
)
def test_a_grammar_in_gbnf_allows_its_language(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    lark = from_gbnf(grammar)
    assert [text for text in good if not allows(lark, text)] == []
    assert [text for text in bad if allows(lark, text)] == []


@pytest.mark.parametrize(
    "grammar", ['start: "a ::= b"', "start: A // a ::= b\nA: /a ::= b/", 'x: "a"\nstart: x']
)
def test_a_grammar_in_lark_stays_as_it_is(grammar: str) -> None:
    assert from_gbnf(grammar) == grammar


def test_only_keywords_that_exclude_nothing_are_left_out() -> None:
    names: dict[str, Any] = {"uniqueItems": False, "not": False, "nullable": {"not": False}}
    schema = {
        "properties": names,
        "uniqueItems": False,
        "nullable": True,
        "items": [{"propertyNames": {"type": "string"}}, {"propertyNames": {"pattern": "a"}}],
        "const": {"uniqueItems": False},
    }
    assert effective(schema) == {
        "properties": {"uniqueItems": False, "not": False, "nullable": {}},
        "nullable": True,
        "items": [{}, {"propertyNames": {"pattern": "a"}}],
        "const": {"uniqueItems": False},
    }
