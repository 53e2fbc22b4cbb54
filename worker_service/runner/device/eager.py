"""The forward pass of a step on a device, operation by operation."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pagewire_kernels.batch import LayerMemory, RowAdapters, SamplingRows, StateSaves, StepInputs
from worker_service.models.interface import Model
from worker_service.pinned_memory import Column, Staging
from worker_service.runner.batch.forward import forward_of
from worker_service.runner.batch.inputs import whole_texts
from worker_service.runner.device.columns import StepColumns
from worker_service.runner.device.reports import DevicePass
from worker_service.runner.device.state import DeviceState


def compute_eagerly(
    columns: StepColumns,
    model: Model,
    caches: Sequence[LayerMemory],
    state: DeviceState,
    staging: Staging,
) -> DevicePass:
    """Send the inputs of any step, and queue its forward pass."""
    inputs, reported = columns.inputs, columns.reports.columns
    host: list[Column] = [
        inputs.token_ids,
        inputs.positions,
        inputs.token_row_ids,
        inputs.row_ids,
        inputs.context_lens,
        inputs.query_start,
        columns.states,
        *columns.sampling,
        *(column for saves in inputs.saves for column in saves),
        *([] if columns.adapter_slots is None else [columns.adapter_slots]),
    ]
    int32 = [column.astype(np.int32) for column in host]
    sent = iter(staging.send([*int32, *reported, *columns.of_drafts, *columns.changes]))
    token_ids, positions, token_rows, seq_rows = (next(sent) for _ in range(4))
    context_lens, query_start, states = (next(sent) for _ in range(3))
    row_ids, outputs, mask_rows = (next(sent) for _ in columns.sampling)
    saves = [
        StateSaves(*(next(sent) for _ in of_group)) if of_group else None
        for of_group in inputs.saves
    ]
    adapters: RowAdapters = ()
    of_states: RowAdapters = ()
    if columns.adapter_slots is not None:
        adapters = next(sent)
        of_states = adapters.index_select(0, states)
    reports = [next(sent) for _ in reported]
    of_drafts = [next(sent) for _ in columns.of_drafts]
    state.rows.apply([*sent])
    columns.begin_drafts(of_drafts, state.sampler)
    if inputs.token_types is not None:
        batch = whole_texts(inputs, token_ids.device)
    else:
        batch = state.sampler.prepare(
            StepInputs(token_ids, positions, token_rows, seq_rows, context_lens),
            caches,
            query_start,
            inputs.max_context_len,
            max_query_len=inputs.max_query_len,
            num_decodes=inputs.num_decodes,
        )
        attention = batch.attention
        if saves:
            pairs = zip(attention, saves, strict=True)
            attention = tuple(replace(group, saves=of_group) for group, of_group in pairs)
        batch = replace(
            batch,
            attention=attention,
            adapters=adapters,
            has_virtual_tokens=inputs.has_virtual_tokens,
        )
    hidden, _, captured = forward_of(model)(batch)
    return DevicePass(
        rows=SamplingRows(row_ids, outputs, mask_rows, state.sampler.no_masks),
        logits=lambda: model.compute_logits(hidden.index_select(0, states), of_states),
        reported=reports,
        hidden=hidden,
        captured=captured,
    )
