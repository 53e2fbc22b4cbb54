"""What a thread of a program leaves undone, when the system takes its core away, others do."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.linear import HugeMemory, NativeWeight
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import Program, record
from tests.support.native import native_libraries

LIBRARIES = native_libraries()
NUM_ROWS, SIZE = 3, 320
COMPUTING, GONE = 1, 3

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no compiled kernels for this processor")


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.instruction_set)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    return found


class Product:
    """A program of two products, one after the other."""

    def __init__(self, library: Library) -> None:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(SIZE, SIZE, generator=generator)
        self.weight = NativeWeight(weight, library, HugeMemory())
        self.program = Program(library, NUM_ROWS)
        with record(self.program):
            self.x = self.program.buffers.take((NUM_ROWS, SIZE), torch.float32)
            self.middle = self.weight.apply(self.x)
            self.y = self.weight.apply(self.middle)
        self.x.copy_(torch.randn(NUM_ROWS, SIZE, generator=generator))

    def expected(self) -> Tensor:
        return self.weight.apply(self.weight.apply(self.x))


def _holding(step: int, next_item: int, end: int, at: int) -> int:
    """`Share::pack` of src/share.h."""
    return step << 50 | end << 26 | next_item << 2 | at


@pytest.mark.parametrize(
    ("next_item", "end"), [(1, 1), (1, 10), (4, 7), (10, 10)], ids=lambda value: str(value)
)
def test_a_step_is_done_though_a_thread_of_it_never_comes_back(
    library: Library, next_item: int, end: int
) -> None:
    """It is computing the item before `next_item`, and has not begun those up to `end`; what it
    had before is written, and all items after it are to be taken still."""
    product = Product(library)
    expected = product.expected()
    first = product.weight.apply(product.x)

    def one_comes(kernel: Any, address: int, num_threads: int) -> None:
        assert num_threads == 2
        program = product.program
        program._program.state = 1  # one thread is on the first step
        program._program.num_threads = 1
        ctypes.c_uint64.from_address(program._program.shares).value = _holding(
            0, next_item, end, COMPUTING
        )
        task = program._steps[0][1]
        task.next_item = end  # type: ignore[attr-defined]
        product.middle[:, : 32 * (next_item - 1)] = first[:, : 32 * (next_item - 1)]
        kernel.call(address)

    product.program.run(2, one_comes)
    assert torch.equal(product.y, expected)
    assert product.program.num_taken_over == 1
    word = ctypes.c_uint64.from_address(product.program._program.shares).value
    assert word & 3 == GONE, "when it comes back it must not write"


def test_an_item_that_takes_long_is_not_begun_again_and_again(library: Library) -> None:
    """By two threads in turns, each of which would throw away what the other has done so far."""
    num_rows, num_inputs, num_runs = 6, 600_000, 8
    weight = NativeWeight(torch.ones(1, num_inputs), library, HugeMemory())
    program = Program(library, num_rows)
    with record(program):
        x = program.buffers.take((num_rows, num_inputs), torch.float32)
        y = weight.apply(x)
    x.fill_(1.0)
    pool = threads.ThreadPool(2)
    for _ in range(num_runs):
        program.run(2, pool.run)
        assert (y == num_inputs).all()
    pool.close()
    # Seldom, where another process really has a thread's core.
    assert program.num_taken_over <= num_runs


def test_threads_that_outnumber_the_cores_change_nothing(library: Library) -> None:
    """They keep each other from the cores, in the middle of items too."""
    product = Product(library)
    expected = product.expected()
    pool = threads.ThreadPool(8)
    for _ in range(200):
        product.y.zero_()
        product.middle.zero_()
        product.program.run(8, pool.run)
        assert torch.equal(product.y, expected)
    pool.close()
