"""Invalid settings are refused by name."""

import pytest

from worker_service.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    NetworkConfig,
    WorkerConfig,
)
from worker_service.errors import InvalidOption


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 24}, "block_size"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"kv_cache_memory": 0}, "kv_cache_memory"),
        ({"swap_space": -1}, "swap_space"),
    ],
)
def test_a_cache_that_cannot_be(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidOption, match=f"{named}: expected"):
        CacheConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"max_loras": 4}, {"max_lora_rank": 8}, {"lora_modules": ["a=/a"]}]
)
def test_settings_of_adapters_need_adapters(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match=f"{next(iter(fields))}: expected none without"):
        AdapterConfig(**fields)  # type: ignore[arg-type]
    AdapterConfig(enable_lora=True, **fields)  # type: ignore[arg-type]


def test_a_worker_that_cannot_be() -> None:
    with pytest.raises(InvalidOption, match="grace_period: expected"):
        WorkerConfig(model=ModelConfig(model="m"), grace_period_s=-1.0)


@pytest.mark.parametrize("model", ["/models/tiny", "meta-llama/Llama-3", "embedded"])
def test_a_model_is_served_under_the_name_that_was_given(model: str) -> None:
    config = WorkerConfig(model=ModelConfig(model=model))
    assert (config.model_name, config.model_aliases) == (model, [])
    names = ["large", model, "large", "small"]
    config = WorkerConfig(model=ModelConfig(model=model), served_model_name=names)
    assert (config.model_name, config.model_aliases) == ("large", [model, "small"])
    with pytest.raises(InvalidOption, match="served_model_name: expected names that are not empty"):
        WorkerConfig(model=ModelConfig(model=model), served_model_name=[""])


@pytest.mark.parametrize(("model", "names"), [("m", ["caf\udce9"]), ("/caf\udce9.gguf", [])])
def test_a_name_that_no_message_can_hold_is_refused(model: str, names: list[str]) -> None:
    with pytest.raises(InvalidOption, match=r"served_model_name: expected Unicode text, got .*caf"):
        WorkerConfig(model=ModelConfig(model=model), served_model_name=names)


@pytest.mark.parametrize("field", ["reasoning_parser", "tool_call_parser"])
def test_an_unknown_parser_is_refused_with_the_names_of_all(field: str) -> None:
    with pytest.raises(InvalidOption, match=f"{field}: expected one of auto, none, .* got 'qwen'"):
        WorkerConfig(model=ModelConfig(model="m"), **{field: "qwen"})  # type: ignore[arg-type]


def test_each_process_draws_new_ids() -> None:
    first, second = NetworkConfig(), NetworkConfig()
    assert len({first.group_id, first.worker_id, second.group_id, second.worker_id}) == 4
