"""Messages as plain values."""

from pagewire.plain import plain, word
from pagewire.v1 import model_pb2, status_pb2


def column(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


def test_columns_are_lists_of_integers_and_enums_are_words() -> None:
    message = status_pb2.EngineStatus(num_finished=2**40)
    group = message.groups.add(group_id="g", state=status_pb2.WORKER_STATE_DRAINING)
    group.gpu_blocks.owners = column(7, -1)
    group.gpu_blocks.num_references = bytes([255, 0])
    message.requests.add(
        state=status_pb2.REQUEST_STATE_SWAPPED,
        events=[status_pb2.REQUEST_EVENT_QUEUED, 99],
        block_tables=[column(1, 2), column()],
    )
    values = plain(message, omitted=["version"])
    assert "version" not in values
    assert values["num_finished"] == 2**40
    [of_group] = values["groups"]
    assert (of_group["state"], word(group, "state")) == ("draining", "draining")
    assert of_group["gpu_blocks"] == {"owners": [7, -1], "num_references": [255, 0]}
    assert of_group["cpu_blocks"] == {"owners": [], "num_references": []}
    [request] = values["requests"]
    assert request["state"] == "swapped"
    assert request["events"] == ["queued", "unspecified"], "a newer server's event"
    assert request["block_tables"] == [[1, 2], []]


def test_a_field_whose_absence_differs_from_zero_is_none() -> None:
    info = model_pb2.ModelInfo(eos_token_ids=column(2, 3))
    assert (plain(info)["bos_token_id"], plain(info)["eos_token_ids"]) == (None, [2, 3])
    assert plain(model_pb2.ModelInfo(bos_token_id=0))["bos_token_id"] == 0
