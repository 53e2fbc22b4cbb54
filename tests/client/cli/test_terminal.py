"""What commands write where."""

import pytest

from pagewire_cli import terminal
from pagewire_client.outputs import OutputDelta


def test_a_thought_goes_to_standard_error_and_the_answer_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = [("I [b]wonder[/b]", ""), (".", "It"), ("", " is.")]
    deltas = [OutputDelta(index=0, token_ids=[], reasoning=r, text=text) for r, text in parts]
    terminal.write_answer(deltas)
    written = capsys.readouterr()
    assert (written.out, written.err) == ("It is.\n", "I [b]wonder[/b].\n\n")
