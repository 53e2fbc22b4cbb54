"""A memory's blocks in characters: half a cell per block in colour, a letter without.

Where there are more blocks than room, a cell stands for several: it shows the first of them that
is in use, or else the first that is cached.
"""

import colorsys
from collections.abc import Sequence
from functools import lru_cache

from rich.color import Color
from rich.style import Style
from rich.text import Text

from pagewire.v1.status_pb2 import BlockMap

_CACHED = -1
_GOLDEN_ANGLE = 0.381966
_CACHED_COLOUR = Color.from_rgb(92, 98, 108)
_EMPTY_COLOUR = Color.from_rgb(38, 42, 48)
_LETTERS = {"shared": "%", "used": "#", "cached": ":", "empty": "."}
LEGEND = "# in use  % shared  : free, cached  . empty"

Cell = tuple[int, bool]
"""A cell's owner, and whether it is shared."""


def draw(blocks: BlockMap, width: int, height: int, *, in_colour: bool) -> list[Text]:
    """Rows of a map, as few as show it, `height` at most."""
    per_character = 2 if in_colour else 1
    num_blocks = len(blocks.num_references)
    if not num_blocks or height < 1:
        return []
    room = width * height * per_character
    cells = _cells(blocks, -(-num_blocks // room))
    if not in_colour:
        return [_letters(cells[i : i + width]) for i in range(0, len(cells), width)]
    rows = [cells[i : i + width] for i in range(0, len(cells), width)]
    return [_halves(rows[i], rows[i + 1 : i + 2]) for i in range(0, len(rows), 2)]


@lru_cache(maxsize=4096)
def colour_of(number: int) -> Color:
    """A request's colour; those next in number are far apart in hue."""
    lightness = 0.55 if number % 2 else 0.66
    red, green, blue = colorsys.hls_to_rgb(number * _GOLDEN_ANGLE % 1, lightness, 0.55)
    return Color.from_rgb(red * 255, green * 255, blue * 255)


def _cells(blocks: BlockMap, blocks_per_cell: int) -> list[Cell]:
    owners = memoryview(blocks.owners).cast("i").tolist()
    shared = [references > 1 for references in blocks.num_references]
    if blocks_per_cell == 1:
        return list(zip(owners, shared, strict=True))
    return [
        _summary(owners[i : i + blocks_per_cell], shared[i : i + blocks_per_cell])
        for i in range(0, len(owners), blocks_per_cell)
    ]


def _summary(owners: Sequence[int], shared: Sequence[bool]) -> Cell:
    used = next((index for index, owner in enumerate(owners) if owner > 0), None)
    if used is not None:
        return owners[used], shared[used]
    return min(owners), False


def _letters(cells: Sequence[Cell]) -> Text:
    return Text("".join(_LETTERS[_kind(cell)] for cell in cells))


def _kind(cell: Cell) -> str:
    owner, is_shared = cell
    if owner > 0:
        return "shared" if is_shared else "used"
    return "cached" if owner == _CACHED else "empty"


def _halves(upper: Sequence[Cell], rest: Sequence[Sequence[Cell]]) -> Text:
    """Two rows in one: the upper one in the foreground's colour, the lower one behind it."""
    lower = rest[0] if rest else ()
    text = Text()
    for index, cell in enumerate(upper):
        below = _colour(lower[index]) if index < len(lower) else None
        text.append("▀", Style(color=_colour(cell), bgcolor=below))
    return text


def _colour(cell: Cell) -> Color:
    owner, is_shared = cell
    if owner <= 0:
        return _CACHED_COLOUR if owner == _CACHED else _EMPTY_COLOUR
    if not is_shared:
        return colour_of(owner)
    triplet = colour_of(owner).triplet
    assert triplet is not None
    return Color.from_rgb(*[(255 + part) // 2 for part in triplet])  # lighter: several have it
