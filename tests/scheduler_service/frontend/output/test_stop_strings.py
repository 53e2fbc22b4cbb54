import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.frontend.input.validation import SAMPLING_LIMITS
from scheduler_service.frontend.output.stop_strings import StopMatcher, StopStrings

MAX_STRINGS = SAMPLING_LIMITS["stop"].max_items or 0
MAX_CHARS = SAMPLING_LIMITS["stop"].max_length or 0


# Two letters only, so that stop strings overlap each other and themselves all the time.
pieces = st.lists(st.text("ab", max_size=4), max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def naive_stop(text: str, stops: list[str], first_end: int = 0) -> tuple[int, str] | None:
    """(end, stop string) of the first that is complete past `first_end`, the longest of equals."""
    for end in range(first_end + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def feed(matcher: StopMatcher, pieces: list[str], num_passed: int = 0) -> str:
    shown = ""
    for index, piece in enumerate(pieces):
        shown += matcher.push(piece, may_stop=index >= num_passed)
        if matcher.matched is not None:
            return shown
    return shown + matcher.flush()


@given(pieces, stops, st.booleans())
def test_the_text_ends_where_a_search_of_the_whole_text_says(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(StopStrings(stops), include_stop=include)
    shown = feed(matcher, pieces)
    found = naive_stop(text, stops)
    if found is None:
        assert (shown, matcher.matched) == (text, None)
    else:
        end, stop = found
        assert matcher.matched == stop
        assert shown == text[: end if include else end - len(stop)]


@given(pieces, stops, st.integers(0, 6))
def test_a_stop_string_counts_only_if_it_ends_after_the_passed_pieces(
    pieces: list[str], stops: list[str], num_passed: int
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop=True)
    shown = feed(matcher, pieces, num_passed)
    text = "".join(pieces)
    found = naive_stop(text, stops, first_end=len("".join(pieces[:num_passed])))
    assert shown == (text if found is None else text[: found[0]])


@given(pieces, stops)
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop=False)
    shown = text = ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher(StopStrings([]), include_stop=False)
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


def test_stop_strings_take_a_few_bytes_for_each_of_their_characters() -> None:
    texts = [f"{number:x}" * MAX_CHARS for number in range(MAX_STRINGS)]
    tracemalloc.start()
    kept = StopStrings(texts)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept
    assert size < 16 * sum(map(len, texts))
