"""Types of the numpy arrays that plans, tables and batches consist of."""

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]
