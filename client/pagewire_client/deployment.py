"""Served models, and the state of a deployment: what `get_model` and `get_status` return.

These are the messages of `protos/pagewire/v1/model.proto` and `status.proto`, which document each
field; type checkers and editors know them. What was not requested, or is not known, is empty or 0.

    status = client.get_status(include_blocks=True)
    for group in status.groups:
        print(group.group_id, word(group, "state"), unpack(group.gpu_blocks.owners))

`word` names the value of an enum, `unpack` returns the numbers in a column of bytes, and `plain` is
a message as dictionaries, lists and words, for example for JSON.
"""

from pagewire.cache_groups import describe_cache_group as describe_cache_group
from pagewire.columns import unpack as unpack
from pagewire.loading import describe_load as describe_load
from pagewire.plain import plain as plain
from pagewire.plain import word as word
from pagewire.v1.adapter_pb2 import Adapter as Adapter
from pagewire.v1.model_pb2 import ModelInfo as ModelInfo
from pagewire.v1.status_pb2 import BlockMap as BlockMap
from pagewire.v1.status_pb2 import EngineStatus as EngineStatus
from pagewire.v1.status_pb2 import LatencyHistogram as LatencyHistogram
from pagewire.v1.status_pb2 import RequestStatus as RequestStatus
from pagewire.v1.status_pb2 import WorkerGroupStatus as WorkerGroupStatus
from pagewire.v1.status_pb2 import WorkerLoading as WorkerLoading
from pagewire.v1.status_pb2 import WorkerLoss as WorkerLoss

LOSSES_SHOWN_S = 300.0
"""How long a lost worker is listed, as on the dashboard."""


def lost_workers(status: EngineStatus) -> list[WorkerLoss]:
    """The last loss of each group that was lost within five minutes and has not returned."""
    present = {group.group_id for group in status.groups}
    present |= {load.group_id for load in status.loading}
    since_s = status.uptime_s - LOSSES_SHOWN_S
    recent = [loss for loss in status.worker_losses if loss.lost_at_s > since_s]
    return list({loss.group_id: loss for loss in recent if loss.group_id not in present}.values())
