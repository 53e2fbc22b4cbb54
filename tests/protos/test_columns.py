"""Columns are read and written as the protos declare them."""

from types import SimpleNamespace

import pytest
from google.protobuf.descriptor import FieldDescriptor

from pagewire.columns import MalformedColumn, columns_of, pack, pack_floats, pack_rows, unpack
from pagewire.v1 import plan_pb2
from tests.protos.test_stored_bytes import message_types

OPAQUE = {
    "Submit.fingerprint",
    "ModelAssetChunk.data",
    "RequestError.status",
    "GenerateRequest.lora_digest",
    "Started.lora_digest",
    "GetAdapterRequest.digest",
    "GetAdapterResponse.data",
    "PutAdapterRequest.data",
    "SetAdaptersResponse.missing",
    "BlockLease.token",
    "BlockLease.keys",
    "BlockFetch.token",
    "BlockFetch.keys",
    "ReadBlocksRequest.token",
    "ReadBlocksResponse.data",
    "ReadBlocksResponse.digests",
    "ProcessMemory.probe",
    "CachedBlocks.keys",
}
"""Fields of bytes that hold no numbers."""


def test_every_field_of_bytes_declares_its_column_or_is_opaque() -> None:
    undeclared = {
        f"{descriptor.name}.{field.name}"
        for descriptor in message_types()
        for field in descriptor.fields
        if field.type == FieldDescriptor.TYPE_BYTES and field.name not in columns_of(descriptor)
    }
    assert undeclared == OPAQUE


def test_integers_are_little_endian_int32() -> None:
    assert pack([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert unpack(pack([5, -7, 2**31 - 1])) == [5, -7, 2**31 - 1]
    assert pack_rows([(1, 2), (3, 4)]) == pack([1, 2, 3, 4])
    assert pack_floats([0.5]) == b"\x00\x00\x00\x3f"


def test_a_malformed_column_is_named() -> None:
    with pytest.raises(MalformedColumn, match="ids: expected a multiple of 4 bytes, got 3"):
        unpack(b"abc", "ids")
    plan = plan_pb2.StepPlan(seq_ids=pack([1]), swap_out=pack([1, 2, 3]))
    with pytest.raises(MalformedColumn, match="swap_out: expected a multiple of 8 bytes, got 12"):
        columns_of(plan_pb2.StepPlan.DESCRIPTOR).unpack(plan)


def test_empty_columns_are_left_out_and_mean_what_the_proto_says() -> None:
    columns = columns_of(plan_pb2.StepPlan.DESCRIPTOR)
    values = SimpleNamespace(**dict.fromkeys(columns, ()) | {"seq_ids": [4, 5], "output": [1, 0]})
    plan = plan_pb2.StepPlan(**columns.pack(values))
    assert {field.name for field, _ in plan.ListFields()} == {"seq_ids", "output"}
    unpacked = columns.unpack(plan)
    assert (unpacked["seq_ids"], unpacked["output"], unpacked["copy"]) == ([4, 5], [1, 0], [])
    assert unpacked["num_tokens"] is None
    assert (columns["num_tokens"].absent, columns["lookahead"].absent) == (1, 0)
