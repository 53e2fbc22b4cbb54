"""Workers come, go, hang, are replaced and drained; requests go on."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from scheduler_service.columns import from_column
from scheduler_service.core_service.service import SERVICE_NAME, CoreService
from tests.scheduler_service.core_service.conftest import Fleet
from tests.support.attached_frontend import AttachedFrontend
from tests.support.fake_worker import ASSETS, BLOCK_SIZE, FakeWorker, counted
from tests.support.waiting import until

SHORT_LEASE_MS = 1_500
"""Of tests in which one runs out; the others' heartbeats, every 30 ms, must not be that late."""


def ready_groups(service: CoreService) -> list[str]:
    return [worker.registration.group_id for worker in service.registry if worker.is_ready]


async def is_serving(service: CoreService, name: str) -> bool:
    async with grpc.aio.insecure_channel(service.address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        response = await health_pb2_grpc.HealthStub(channel).Check(request)
    return response.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
async def test_health_is_serving_while_a_group_is_ready(
    service: CoreService, fleet: Fleet, name: str
) -> None:
    assert not await is_serving(service, name)
    worker = await fleet.start(FakeWorker())
    async with AttachedFrontend(service.address) as frontend:
        await until(lambda: frontend.models == ["counter"], "the model is served")
        assert await is_serving(service, name)
        await worker.kill()
        await until(lambda: frontend.models == [], "the model is not served any more")
        assert not await is_serving(service, name)


async def test_each_alias_is_one_models(service: CoreService, fleet: Fleet) -> None:
    await fleet.start(FakeWorker("first", model="a", aliases=["small", "b"]))
    await fleet.start(FakeWorker("second", model="a", aliases=["tiny", "small"]))
    await fleet.start(FakeWorker("third", model="b", aliases=["small", "large"]))
    await until(lambda: len(ready_groups(service)) == 3, "all are ready")
    models = service.registry.served_models()
    assert [(model.name, list(model.aliases)) for model in models] == [
        ("a", ["small", "tiny"]),
        ("b", ["large"]),
    ]


async def test_a_model_has_the_length_that_the_largest_cache_holds(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(FakeWorker("small", model="a", num_gpu_blocks=3))
    await until(lambda: len(ready_groups(service)) == 1, "it is ready")
    [model] = service.registry.served_models()
    assert (model.max_model_len, model.max_cached_tokens) == (512, 3 * BLOCK_SIZE + 1)
    await fleet.start(FakeWorker("large", model="a", num_gpu_blocks=5))
    await until(lambda: len(ready_groups(service)) == 2, "both are ready")
    [model] = service.registry.served_models()
    assert model.max_cached_tokens == 5 * BLOCK_SIZE + 1


async def test_a_model_takes_texts_that_a_step_can_compute(
    service: CoreService, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = FakeWorker("encoder", model="a", pools=True)
    encoder.model.whole_prompt = True
    encoder.model.work_kinds[:] = ["WORK_KIND_POOLING"]
    short = FakeWorker("short", model="b", max_model_len=16)
    short.model.CopyFrom(encoder.model)
    short.model.name, short.model.max_model_len = "b", 16
    await fleet.start(encoder)
    await fleet.start(short)
    await fleet.start(FakeWorker("decoder", model="c", pools=True))
    await until(lambda: len(ready_groups(service)) == 3, "all are ready")
    limits = [model.pooling.max_text_tokens for model in service.registry.served_models()]
    assert limits == [16, 0, 0]
    [warning] = [r for r in caplog.messages if "texts are limited to a step's tokens" in r]
    assert "model=a max_num_batched_tokens=16 max_model_len=512" in warning


async def test_frontends_learn_of_models_that_were_served_before_they_attached(
    service: CoreService, fleet: Fleet
) -> None:
    first = await fleet.start(FakeWorker("first", model="a"))
    await fleet.start(FakeWorker("second", model="b"))
    async with AttachedFrontend(service.address, "early") as early:
        await until(lambda: early.models == ["a", "b"], "both models are served")
        await first.kill()
    async with AttachedFrontend(service.address, "late") as frontend:
        await until(lambda: frontend.models == ["b"], "the other model is not served any more")
        assert frontend.known_models == ["a", "b"]


async def test_frontends_learn_of_models_whose_workers_are_not_ready(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(FakeWorker("first", model="a"))
    second = FakeWorker("second", model="b", aliases=["c"])
    second.may_initialize.clear()
    async with AttachedFrontend(service.address) as frontend:
        await until(lambda: frontend.models == ["a"], "one model is served")
        await fleet.start(second)
        await until(lambda: frontend.known_models == ["a", "b", "c"], "the other has a worker")
        assert frontend.models == ["a"]
        second.may_initialize.set()
        await until(lambda: frontend.models == ["a", "b"], "both models are served")


@pytest.mark.parametrize("lease_ms", [SHORT_LEASE_MS])
async def test_a_worker_that_hangs_loses_its_lease_and_its_requests_go_on(
    service: CoreService, fleet: Fleet
) -> None:
    first = await fleet.start(FakeWorker("first"))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=300)
        await frontend.wait_tokens(1, 3)
        first.hold_results()
        first.silence()
        await until(lambda: not list(service.registry), "the lease expired")
        await fleet.start(FakeWorker("second"))
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 300)


@pytest.mark.parametrize("lease_ms", [SHORT_LEASE_MS])
async def test_a_worker_that_comes_back_after_its_lease_is_welcome_again(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    await until(lambda: ready_groups(service), "the group is ready")
    worker.silence()
    await until(lambda: not list(service.registry), "the lease expired")
    worker.resume()
    worker.register(service.address, last_epoch=worker.epochs[-1])
    await until(lambda: ready_groups(service), "the group is ready again")
    assert worker.epochs == [1, 2]


async def test_a_broken_step_stream_is_opened_again_with_a_greater_epoch(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker(), last_epoch=6)
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=300)
        await frontend.wait_tokens(1, 10)
        worker.break_stream()
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 300)
    assert worker.epochs == [7, 8]
    assert worker.num_profiles == 1
    assert worker.directives == ["serve"]


async def test_a_registration_with_an_epoch_that_no_core_draws_is_refused(
    service: CoreService, fleet: Fleet
) -> None:
    hostile = await fleet.start(FakeWorker("hostile"), last_epoch=2**64 - 1)
    await until(lambda: hostile.directives == ["error: INVALID_ARGUMENT"], "it is refused")
    assert not list(service.registry)


async def test_a_worker_that_has_seen_an_epoch_that_no_core_draws_is_told_to_end(
    core: SchedulerServiceStub, fleet: Fleet
) -> None:
    worker = FakeWorker("fooled")
    worker.last_epoch = 2**64 - 1
    await fleet.start(worker)
    await until(lambda: worker.directives[-1:] == ["stop"], "it is asked to end")
    assert (await core.GetStatus(pb.SchedulerServiceGetStatusRequest())).HasField("status")


async def test_a_wrong_advertised_address_is_told_and_tried_again(
    service: CoreService, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    right = await fleet.start(FakeWorker("right"))
    wrong = FakeWorker("wrong")
    wrong.advertise = right.address
    await fleet.start(wrong)
    await until(lambda: caplog.text.count("not wrong: does --advertise name") > 1, "tried again")
    assert "retry_in_s" in caplog.text
    assert ready_groups(service) == ["right"]


async def test_a_late_answer_to_an_older_epoch_changes_nothing(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    worker.answer_first_as_epoch = 0
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=5)
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 5)
    assert worker.epochs == [1]


async def test_a_result_out_of_order_ends_the_stream_and_requests_go_on(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    worker.answer_next_as_step = 77
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=5)
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 5)
    assert worker.epochs == [1, 2]


async def test_a_newcomer_replaces_the_worker_of_the_same_group(
    service: CoreService, fleet: Fleet
) -> None:
    old = await fleet.start(FakeWorker("old", group_id="g"))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [1, 2, 3], max_tokens=300)
        await frontend.wait_tokens(1, 3)
        new = await fleet.start(FakeWorker("new", group_id="g"))
        await until(lambda: old.stop_reason, "the old one was asked to stop")
        assert "new" in (old.stop_reason or "")
        await frontend.wait_finished(1)
        assert frontend.tokens[1] == counted(3, 300)
    assert new.num_results > 0
    assert [worker.registration.worker_id for worker in service.registry] == ["new"]


async def test_a_worker_that_registers_twice_is_not_asked_to_stop(
    service: CoreService, fleet: Fleet
) -> None:
    worker = await fleet.start(FakeWorker())
    await until(lambda: ready_groups(service), "the group is ready")
    worker.register(service.address, last_epoch=worker.epochs[-1])
    await until(lambda: worker.epochs == [1, 2], "it was dialled again")
    await until(lambda: ready_groups(service), "the group is ready again")
    # The former stream may end under one of its heartbeats, which then fails.
    assert [directive for directive in worker.directives if not directive.startswith("error")] == [
        "serve"
    ] * 2


async def test_a_worker_that_names_no_parser_agrees_with_one_that_says_auto(
    service: CoreService, fleet: Fleet
) -> None:
    await fleet.start(FakeWorker("first"))
    other = await fleet.start(FakeWorker("second", reasoning_parser=""))
    assert other.directives == ["serve"]


@pytest.mark.parametrize("fact", ["fingerprint", "dtype", "reasoning_parser"])
async def test_another_model_of_the_same_name_is_refused(
    service: CoreService, fleet: Fleet, fact: str
) -> None:
    await fleet.start(FakeWorker("first"))
    other = await fleet.start(FakeWorker("second", **{fact: "other"}))  # type: ignore[arg-type]
    assert other.directives == ["stop"]
    assert "other" in (other.stop_reason or "")
    assert [worker.registration.worker_id for worker in service.registry] == ["first"]


async def test_a_worker_without_memory_is_told_so(service: CoreService, fleet: Fleet) -> None:
    worker = await fleet.start(FakeWorker(num_gpu_blocks=0))
    await until(lambda: worker.stop_reason, "it was asked to stop")
    assert "block" in (worker.stop_reason or "")


@pytest.mark.parametrize(
    ("rpc", "reason"),
    [
        ("ProfileBlocks", "the largest batch cannot be computed"),
        ("InitializeCache", "decode steps cannot be captured"),
    ],
)
async def test_a_worker_that_can_never_serve_is_stopped_with_its_reason(
    service: CoreService, fleet: Fleet, rpc: str, reason: str
) -> None:
    worker = FakeWorker()
    worker.refuses_to = rpc
    await fleet.start(worker)
    await until(lambda: worker.stop_reason, "it was asked to stop")
    assert reason in (worker.stop_reason or "")
    assert worker.num_profiles == 1


async def test_a_registration_without_facts_is_an_error(core: SchedulerServiceStub) -> None:
    call = core.RegisterWorker()
    await call.write(pb.RegisterWorkerRequest(heartbeat=pb.WorkerHeartbeat()))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "registration" in (error.value.details() or "")


async def test_a_worker_that_loads_its_model_is_in_the_status_and_known_to_frontends(
    service: CoreService, core: SchedulerServiceStub
) -> None:
    def report(done_bytes: int) -> pb.RegisterWorkerRequest:
        load = status_pb2.WorkerLoading(
            group_id="new", model="m", phase="loading weights", done_bytes=done_bytes
        )
        return pb.RegisterWorkerRequest(heartbeat=pb.WorkerHeartbeat(loading=load))

    async def reported() -> list[int]:
        response = await core.GetStatus(pb.SchedulerServiceGetStatusRequest())
        return [load.done_bytes for load in response.status.loading]

    async with AttachedFrontend(service.address) as frontend:
        call = core.RegisterWorker()
        await call.write(report(1))
        assert (await call.read()).directive.serve.lease_ms == 60_000
        await until(lambda: frontend.loading == [1], "frontends learn of the load")
        assert await reported() == [1]
        await call.write(report(2))
        await until(lambda: frontend.loading == [2], "and of its progress")
        assert ready_groups(service) == []
        await call.done_writing()
        await until(lambda: frontend.loading == [], "and of its end")
        assert await reported() == []


@pytest.mark.parametrize("lease_ms", [SHORT_LEASE_MS])
async def test_a_worker_that_falls_silent_while_it_loads_is_not_listed(
    service: CoreService, core: SchedulerServiceStub
) -> None:
    call = core.RegisterWorker()
    load = status_pb2.WorkerLoading(group_id="new", model="m")
    await call.write(pb.RegisterWorkerRequest(heartbeat=pb.WorkerHeartbeat(loading=load)))
    await call.read()
    await until(lambda: len(service.registry.loading()) == 1, "it is listed")
    with pytest.raises(grpc.aio.AioRpcError, match="no heartbeat for"):
        await call.read()
    assert service.registry.loading() == []


async def test_assets_are_fetched_once_per_fingerprint_in_pieces_of_a_mebibyte(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    first = await fleet.start(FakeWorker("first"))
    second = await fleet.start(FakeWorker("second"))
    request = pb.SchedulerServiceGetModelAssetsRequest(model="counter")
    for _ in range(3):
        files: dict[str, bytes] = {}
        async for response in core.GetModelAssets(request):
            assert len(response.chunk.data) <= 1 << 20
            name = response.chunk.file_name
            files[name] = files.get(name, b"") + response.chunk.data
        assert files == ASSETS
    assert first.num_asset_calls + second.num_asset_calls == 1


async def test_assets_come_from_a_worker_that_still_loads_its_model(
    service: CoreService, core: SchedulerServiceStub
) -> None:
    worker = FakeWorker("loading")
    await worker.listen()
    load = status_pb2.WorkerLoading(
        group_id="new", model="m", address=worker.address, fingerprint="those"
    )
    call = core.RegisterWorker()
    await call.write(pb.RegisterWorkerRequest(heartbeat=pb.WorkerHeartbeat(loading=load)))
    await until(service.registry.loading, "it is listed")

    async def num_bytes(fingerprint: str) -> int:
        request = pb.SchedulerServiceGetModelAssetsRequest(model="m", fingerprint=fingerprint)
        return sum([len(part.chunk.data) async for part in core.GetModelAssets(request)])

    for _ in range(2):  # and they are kept
        assert await num_bytes("those") == sum(map(len, ASSETS.values()))
    assert worker.num_asset_calls == 1
    with pytest.raises(grpc.aio.AioRpcError, match="no worker could send") as error:
        await num_bytes("others")
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    call.cancel()
    await worker.kill()


async def test_assets_of_an_unknown_model_are_not_found(core: SchedulerServiceStub) -> None:
    call = core.GetModelAssets(pb.SchedulerServiceGetModelAssetsRequest(model="nobody"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_assets_come_from_the_worker_that_answers(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    await fleet.start(FakeWorker("a-mute", mute_assets=True))
    good = await fleet.start(FakeWorker("b-good"))
    call = core.GetModelAssets(pb.SchedulerServiceGetModelAssetsRequest(model="counter"))
    assert sum([len(response.chunk.data) async for response in call]) == sum(
        map(len, ASSETS.values())
    )
    assert good.num_asset_calls == 1


async def test_status_tells_of_requests_and_groups(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    worker = await fleet.start(FakeWorker("w", group_id="g"))
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, range(8), max_tokens=400)
        await frontend.wait_tokens(1, 5)
        worker.hold_results()
        response = await core.GetStatus(pb.SchedulerServiceGetStatusRequest())
        status = response.status
        assert (status.num_running, status.num_frontends) == (1, 1)
        assert list(status.models) == ["counter"]
        (group,) = status.groups
        assert (group.group_id, group.model, group.epoch) == ("g", "counter", 1)
        assert group.state == status_pb2.WORKER_STATE_READY
        assert group.address == worker.address
        assert group.uses_cuda_graphs
        assert group.weights == "Q4_1"
        assert group.cache_layout == "growing of 4 tokens (cpu), 0.0% unused"
        assert group.num_gpu_blocks == worker.num_gpu_blocks
        assert 0 < group.num_free_gpu_blocks < worker.num_gpu_blocks
        assert group.num_steps >= 4
        worker.may_answer.set()


async def test_a_status_in_detail_tells_of_requests_and_blocks(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    worker = await fleet.start(FakeWorker("w", group_id="g"))
    detail = status_pb2.StatusDetail(include_requests=True, include_blocks=True)
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, range(8), max_tokens=400)
        await frontend.wait_tokens(1, 5)
        worker.hold_results()
        plain = (await core.GetStatus(pb.SchedulerServiceGetStatusRequest())).status
        assert not plain.requests
        assert not plain.groups[0].HasField("gpu_blocks")
        asked = pb.SchedulerServiceGetStatusRequest(detail=detail)
        status = (await core.GetStatus(asked)).status
        [request] = status.requests
        assert request.state == status_pb2.REQUEST_STATE_DECODING
        assert (request.group_id, request.num_prompt_tokens) == ("g", 8)
        assert request.num_output_tokens >= 5
        assert len(request.events) == len(request.event_times_us) == len(request.event_values)
        [group] = status.groups
        owners = from_column(group.gpu_blocks.owners, "owners")
        [table] = [from_column(column, "table") for column in request.block_tables]
        assert [owners[block] for block in table] == [request.number] * len(table)
        assert len(group.gpu_blocks.num_references) == len(owners) == group.num_gpu_blocks
        assert owners.count(0) == group.num_free_gpu_blocks
        assert sum(status.time_to_first_token.counts) == 1
        worker.may_answer.set()


async def test_a_lost_worker_is_remembered_and_one_that_was_told_to_end_is_not(
    service: CoreService, fleet: Fleet, core: SchedulerServiceStub
) -> None:
    lost = await fleet.start(FakeWorker("lost", group_id="g"))
    await until(lambda: ready_groups(service), "the group is ready")
    await lost.kill()
    await until(lambda: not list(service.registry), "its stream broke")
    await fleet.start(FakeWorker("drained"))
    await until(lambda: ready_groups(service), "the other is ready")
    await core.DrainWorker(pb.DrainWorkerRequest(group_id="drained"))
    await until(lambda: not list(service.registry), "it has left")
    status = (await core.GetStatus(pb.SchedulerServiceGetStatusRequest())).status
    assert [(loss.group_id, loss.rank, loss.model) for loss in status.worker_losses] == [
        ("g", 0, "counter")
    ]
    assert status.num_worker_losses == 1


async def test_more_requests_than_can_be_told_are_refused_by_name(
    core: SchedulerServiceStub,
) -> None:
    detail = status_pb2.StatusDetail(include_requests=True, max_requests=5_000)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await core.GetStatus(pb.SchedulerServiceGetStatusRequest(detail=detail))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "max_requests" in str(error.value.details())


async def test_a_summary_is_logged_when_something_happened(
    service: CoreService, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.start(FakeWorker())
    caplog.set_level("INFO")
    logging_summaries = asyncio.create_task(service.status.log_summaries(0.05))
    await asyncio.sleep(0)
    async with AttachedFrontend(service.address) as frontend:
        await frontend.submit(1, [3], max_tokens=7)
        await frontend.wait_finished(1)
    await until(lambda: "num_finished=1" in caplog.text, "a summary was logged")
    logging_summaries.cancel()


async def test_a_watch_without_a_pause_is_refused(core: SchedulerServiceStub) -> None:
    call = core.WatchStatus(pb.SchedulerServiceWatchStatusRequest(interval_ms=1))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
