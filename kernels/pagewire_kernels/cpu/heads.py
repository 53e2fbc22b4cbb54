"""Products of the heads of rows, each with a weight of its own, in C++; see src/linear.cpp."""

from torch import Tensor

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.adapters import ActiveRows, NativeDeltas
from pagewire_kernels.cpu.checks import DTYPES, require
from pagewire_kernels.cpu.linear import SERIAL_PRODUCTS, Memory, NativeWeight, Pieces
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import count_address, launch, new_rows
from pagewire_kernels.cpu.tasks import HeadsTask, rows_of


class NativeHeads:
    """Weights by head, packed for the C++ kernels. A row has the same bits in any batch."""

    def __init__(self, weights: Tensor, library: Library, memory: Memory) -> None:
        """weights: [num_heads, out_features, in_features], float32 or bfloat16."""
        self.num_heads, self.out_features, self.in_features = weights.shape
        self.dtype = weights.dtype
        pieces = Pieces(memory, self.num_heads)
        self._packed = [NativeWeight(weight, library, pieces) for weight in weights]
        self._head_bytes, self._library = pieces.piece_bytes, library

    def make_deltas(self, rows: ActiveRows, max_slots: int, max_rank: int) -> NativeDeltas:
        """Make slots for what adapters add to the products, as `NativeWeight.make_deltas`. A part's
        head is its `expert`."""
        limits = max_slots, 1, max_rank
        sizes = [self.out_features]
        return NativeDeltas(sizes, rows, *limits, self._library, self.dtype, self.num_heads)

    def apply(self, x: Tensor, num_spare: int = 0, deltas: NativeDeltas | None = None) -> Tensor:
        """Multiply the heads of rows.

        x: [num_rows, num_heads, in_features], with a dense last axis; deltas: what adapters add.
        Returns [num_rows, num_heads, out_features + num_spare], of which the last `num_spare`
        columns are undefined.
        """
        num_rows, num_heads, size = x.shape
        require(
            x.dtype == self.dtype
            and (num_heads, size) == (self.num_heads, self.in_features)
            and x.stride(2) == 1,
            f"dense rows of {self.dtype} [*, {self.num_heads}, {self.in_features}]",
        )
        inner = None if deltas is None else deltas.multiply(x)
        width = self.out_features + num_spare
        y = new_rows(num_rows, num_heads * width, self.dtype)
        num_threads = threads.count_for(x.numel() * self.out_features, SERIAL_PRODUCTS)
        task = HeadsTask(
            num_threads=num_threads,
            num_rows=count_address(num_rows),
            **rows_of(x=x, y=y),
            weight=self._packed[0].address,
            in_features=self.in_features,
            out_features=self.out_features,
            num_heads=num_heads,
            head_bytes=self._head_bytes,
            x_head_stride=x.stride(1),
            y_head_stride=width,
        )
        if deltas is not None and inner is not None:
            for name, value in deltas.fields(inner).items():
                setattr(task, name, value)
        kernel = f"linear_heads_{DTYPES[self.dtype]}"
        launch(self._library.kernel(kernel), task, num_threads)
        return y.unflatten(1, (num_heads, width))
