"""What the test of the GPU's image runs inside it, run here: the image is built by few."""

from tests.containers.inside_worker_cuda import compiled_kernel


def test_the_kernel_that_is_compiled_in_the_image_has_these_parameters() -> None:
    assert compiled_kernel().startswith(b"\x7fELF")
