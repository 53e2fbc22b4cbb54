"""The kernel benchmark counts what it should."""

import torch

from benchmarks.kernel_cases import (
    Setting,
    attention_case,
    layer_cases,
    linear_cases,
    move_cases,
    setting,
)
from benchmarks.kernel_ceilings import KernelCeilings
from benchmarks.kernels import measure

CPU = torch.device("cpu")
CEILINGS = KernelCeilings(read=1e9, copy=2e9, products={torch.float32: 4e9}, bus=None)


def _setting() -> Setting:
    return setting(CPU, torch.float32, "reference")


def test_a_decode_reads_every_key_and_value_once() -> None:
    case = attention_case(_setting(), 3, 1, 20, heads=4, kv_heads=2)
    assert case.num_bytes == 3 * 20 * 2 * 2 * 128 * 4
    assert case.num_flops == 0
    in_int8 = attention_case(_setting(), 3, 1, 20, heads=4, kv_heads=2, cache_dtype=torch.int8)
    assert in_int8.num_bytes == 3 * 20 * 2 * 2 * (128 + 4)
    assert in_int8.size.endswith("int8 cache")
    assert measure(case, CEILINGS, CPU, repeats=1)["bound"] == "GB/s read"
    skewed = attention_case(_setting(), 3, 1, 20, heads=4, kv_heads=2, longest=50)
    assert skewed.num_bytes == (50 + 20 + 20) * 2 * 2 * 128 * 4
    assert skewed.size.startswith("3 x 20, one 50,")


def test_a_prefill_computes_no_product_that_is_hidden() -> None:
    case = attention_case(_setting(), 2, 3, 5, heads=4, kv_heads=2)
    assert case.num_flops == 4 * 128 * 4 * 2 * (3 + 4 + 5)
    row = measure(case, CEILINGS, CPU, repeats=1)
    assert row["bound"] == "GFLOP/s"
    assert row["ceiling"] == 4.0


def test_a_norm_reads_and_writes_its_rows_and_the_residual() -> None:
    case = next(layer_cases(_setting()))
    assert case.num_bytes == 4 * 512 * 4096 * 4
    assert measure(case, CEILINGS, CPU, repeats=1)["bound"] == "GB/s copied"


def test_few_rows_are_bound_by_the_weight_and_many_by_its_products() -> None:
    bounds = {
        case.size.split()[0]: measure(case, CEILINGS, CPU, repeats=1)["bound"]
        for case in linear_cases(_setting())
        if case.implementation == "torch"
    }
    assert bounds == {"1": "GB/s read", "64": "GFLOP/s", "512": "GFLOP/s"}


def test_blocks_moved_in_host_memory_are_read_and_written() -> None:
    cases = [*move_cases(_setting())]
    assert {case.kernel for case in cases} == {"copy blocks", "swap blocks out", "swap blocks in"}
    for case in cases:
        assert case.num_bytes == 2 * 512 * 2**16
        assert measure(case, CEILINGS, CPU, repeats=1)["bound"] == "GB/s copied"
