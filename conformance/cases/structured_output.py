"""Which tokens a constraint allows, derived from the texts of the model's tokens."""

from dataclasses import replace

from conformance.assertions import Skipped, expect, expect_true
from conformance.case import case
from conformance.structured_output import (
    MAX_CANDIDATES,
    KnownConstraint,
    Language,
    end_of,
    expect_allowed,
    json_object_language,
    known_choice,
    known_constraint,
    offered,
    one_of,
    texts,
    texts_of,
)
from conformance.vocabulary import spell
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import sampling_pb2

NAMES = ["red", "reed", "redder", "blue"]
OBJECT = """{"type": "object", "additionalProperties": false, "required": ["b", "a"],
"properties": {"b": {"type": "boolean"}, "a": {"type": "boolean"}}}"""


@case("model", "Whether the worker implements SamplerParams.constraint.")
def a_worker_with_constraints_has_a_tokenizer(worker: Worker) -> None:
    expect_true(any(texts_of(worker)), "no token of tokenizer.json has a text")


@case("sampling", "One of these texts.")
def a_choice_allows_what_continues_one_of_its_texts(worker: Worker) -> None:
    asked = known_choice(worker, *NAMES)
    expect_allowed(worker, asked, "", "r", "re", "red", "reed", "redd", "blu", "redder")
    expect_allowed(worker, asked, spell(texts_of(worker), "reed", longest=True))


@case("sampling", "One of these texts.")
def texts_of_a_choice_are_taken_as_they_are(worker: Worker) -> None:
    odd = ["a.c|d", "(a/b)", '{"a": "\\n"}', "[x]*+?"]
    asked = known_choice(worker, *odd)
    expect_allowed(worker, asked, "", "a", *(text[:-1] for text in odd))


@case("sampling", "A regular expression that the whole output matches.")
def a_regular_expression_allows_what_may_still_match(worker: Worker) -> None:
    language = Language(one_of("x", "yy"), one_of(*"012"), one_of(*"234"), one_of("", "!"))
    asked = known_constraint(worker, {"regex": r"(x|y{2})[0-2][2-4]!?"}, language)
    expect_allowed(worker, asked, "", "x", "y", "yy1", "x02", "yy23!")


@case("sampling", "A context-free grammar, whose `start` the whole output matches.")
def a_grammar_allows_what_may_still_match(worker: Worker) -> None:
    grammar = """start: "(" one ")" | "z"
one: "(" two ")" | "z"
two: "(z)" | "z"
"""
    asked = known_constraint(worker, {"grammar": grammar}, texts("z", "(z)", "((z))", "(((z)))"))
    expect_allowed(worker, asked, "", "(", "(z", "((", "((z)", "(z)", "z")


@case("sampling", "A JSON schema.")
def a_schema_allows_the_json_texts_that_it_describes(worker: Worker) -> None:
    schema = '{"enum": ["red", "re\\"d", 7, true, false, null]}'
    language = texts('"red"', '"re\\"d"', "7", "true", "false", "null")
    asked = known_constraint(worker, {"json_schema": schema}, language)
    expect_allowed(worker, asked, "", '"', '"re', '"red"', "t", "true", "7")


@case("sampling", "Properties appear in the order in which the schema names them.")
def properties_come_in_the_schemas_order(worker: Worker) -> None:
    asked = known_constraint(worker, {"json_schema": OBJECT}, json_object_language("ba"))
    begun = ["", '{"', '{"b":', '{"b":true', '{"b":true,"', '{"b":true,"a":false']
    expect_allowed(worker, asked, *begun, begun[-1] + "}")


@case("sampling", "or a line break and up to 32 spaces or tabs.")
def white_space_in_json_is_bounded(worker: Worker) -> None:
    asked = known_constraint(worker, {"json_schema": OBJECT}, json_object_language("ba"))
    wide = ["{\n" + 31 * " ", "{\n" + 32 * " "]
    expect_allowed(worker, asked, "{ ", "{\n", "{\r", "{\n\t ", '{"b" : ', '{ "b" :true', *wide)


@case("sampling", "byte-level and byte-fallback tokens are bytes")
def a_character_may_come_in_several_tokens(worker: Worker) -> None:
    words = ["\u7af9\u6797", "\u7af9\u7b0b", "\u6885"]
    single = {text: token for token, text in enumerate(texts_of(worker)) if len(text) == 1}
    spelt = [single.get(bytes([byte])) for byte in words[0].encode()]
    tokens = [token for token in spelt if token is not None]
    if len(tokens) < len(spelt):
        raise Skipped("the vocabulary has no tokens for single bytes")
    asked = known_choice(worker, *words)
    expect_allowed(worker, asked, *(tokens[:end] for end in range(len(tokens) + 1)))


@case("sampling", "have no text and are never allowed as text")
def a_token_without_a_text_is_never_allowed(worker: Worker) -> None:
    known = texts_of(worker)
    asked = known_constraint(worker, {"regex": r"(?s:.){8}"}, texts())
    for found in offered(worker, asked, [[], spell(known, "ab")]):
        wrong = [token for token in found.token_ids if not known[token]]
        expect_true(not wrong, f"tokens without a text are offered: {wrong[:8]}")
        expect_true(bool(found.token_ids), "no token is offered")


@case("sampling", "a token of end_token_ids is allowed exactly when the output matches")
def an_output_may_end_when_it_matches_and_not_before(worker: Worker) -> None:
    known = texts_of(worker)
    ends = {end_of(worker), *[token for token, text in enumerate(known) if not text][:8]}
    asked = known_choice(worker, "ab", "abcd", ends=ends)
    expect_allowed(worker, asked, "", "a", "ab", "abc", "abcd")


@case("sampling", "even if it has a text, a token of end_token_ids is allowed exactly when")
def an_end_token_is_never_text(worker: Worker) -> None:
    asked = known_choice(worker, "aa", "ba", "b", ends=spell(texts_of(worker), "a"))
    expect_allowed(worker, asked, "", "b")


@case("sampling", "contains at least min_tokens tokens or no token is allowed as text")
def min_tokens_holds_the_end_back_while_there_is_more(worker: Worker) -> None:
    for min_tokens in (2, 3, 9):
        asked = known_choice(worker, "ab", "abcd", min_tokens=min_tokens)
        expect_allowed(worker, asked, "ab", "abcd")


@case("sampling", "suppressed_token_ids therefore has no meaning with a constraint")
def suppressed_tokens_are_ignored(worker: Worker) -> None:
    suppressed = {"suppressed_token_ids": columns.pack([end_of(worker)])}
    asked = known_choice(worker, "ab", min_tokens=9, others=suppressed)
    expect_allowed(worker, asked, "ab")


@case("sampling", "is allowed when the output matches and no token is allowed as text.")
def a_last_token_is_allowed_where_nothing_else_is(worker: Worker) -> None:
    known, end = texts_of(worker), end_of(worker)
    without = [token for token, text in enumerate(known) if not text and token != end]
    lasts = without[:1] or spell(known, "q")
    asked = known_choice(worker, "ab", "abcd", lasts=lasts)
    expect_allowed(worker, asked, "", "ab", "abcd")


AFTER_THOUGHT = "the text that must match begins with the first token after the thought."
NUM_FORBIDDEN = 32
"""More than the tokens that end an output, or continue after the end `)-` of a thought."""


def thoughtful(asked: KnownConstraint, start: str = "", end: str = ")-") -> KnownConstraint:
    """The same constraint after a thought."""
    return replace(asked, thought=sampling_pb2.Thought(start=start, ends=["<never>", end]))


def expect_equal(
    worker: Worker, asked: KnownConstraint, output: list[int], plain_output: list[int]
) -> None:
    """Fail unless the constraint, after `output`, offers what it offers without a thought after
    `plain_output`."""
    (found,) = offered(worker, asked, [output])
    (plain,) = offered(worker, replace(asked, thought=None), [plain_output])
    expect(f"the tokens offered after {output}", set(found.token_ids), set(plain.token_ids))


@case("sampling", AFTER_THOUGHT)
def the_constraint_applies_after_the_thought(worker: Worker) -> None:
    known = texts_of(worker)
    asked = thoughtful(known_choice(worker, "ab", "abcd"))
    for thought in (")-", 'x"{}\n))-', ")(-a)-"):
        for text in ("", "a", "ab"):
            answer = spell(known, text)
            expect_equal(worker, asked, spell(known, thought) + answer, answer)


@case("sampling", "Until then every token is allowed but")
def a_thought_is_free(worker: Worker) -> None:
    known = texts_of(worker)
    asked = thoughtful(known_choice(worker, "ab"))
    outputs = [spell(known, text) for text in ("", "ab", ')"{\n', "-)", "(x)")]
    for found in offered(worker, asked, outputs):
        wrong = {
            token
            for token in found.token_ids
            if token in asked.ends or b")-" in known[token][:-1] or b"<never>" in known[token][:-1]
        }
        expect_true(not wrong, f"tokens are offered that end the output or go on: {wrong}")
        number = min(MAX_CANDIDATES, worker.vocab_size - NUM_FORBIDDEN)
        expect_true(len(found.token_ids) >= number, "few tokens are offered inside the thought")


@case("sampling", "A special token's text in a thought is its content in")
def a_special_token_may_end_a_thought(worker: Worker) -> None:
    known, asked = texts_of(worker), known_choice(worker, "ab")
    special = {token: text for token, text in worker.special_texts.items() if text}
    token = next((token for token in special if token not in asked.ends), None)
    if token is None:
        raise Skipped("the only special token ends the output")
    thinking = thoughtful(asked, end=special[token].decode())
    expect_equal(worker, thinking, [*spell(known, "x"), token], [])


@case("sampling", "While an output with a thought.start consists of a proper prefix of")
def an_output_without_a_thought_is_constrained_from_its_start(worker: Worker) -> None:
    known = texts_of(worker)
    asked = thoughtful(known_choice(worker, "ab", "(b"), start="((")
    for text in ("a", "ab", "(b"):
        expect_equal(worker, asked, spell(known, text), spell(known, text))
    expect_equal(worker, asked, spell(known, "((x)-a"), spell(known, "a"))
    shown = {known[token] for token in offered(worker, asked, [spell(known, "(")])[0].token_ids}
    expect_true({b"(", b"b"} <= shown, "after `(` neither thought nor answer may be continued")
