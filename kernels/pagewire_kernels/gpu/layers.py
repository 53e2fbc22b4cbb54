"""`LayerKernels` for CUDA devices."""

from pagewire_kernels import reference
from pagewire_kernels.gpu.activation import act_and_mul, activate
from pagewire_kernels.gpu.norm import layer_norm, rms_norm
from pagewire_kernels.gpu.rotary import rotate_and_write_kv


class TritonLayerKernels:
    """A launch for each operation; a row's result is bitwise the same in any batch, since each is
    computed by one program, or within one, in an order that its size alone decides."""

    name = "triton"
    embed = staticmethod(reference.embed)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    activate = staticmethod(activate)
    act_and_mul = staticmethod(act_and_mul)
    rotate_and_write_kv = staticmethod(rotate_and_write_kv)
