"""Services let only members of their cluster in, and talk to nobody else.

A core and a worker, real ones, each on a port of its own, with certificates made for the test.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.model_pb2 import CacheGroup, ModelInfo
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.service import CoreService, make_core_service
from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import Frontend, make_frontend
from service_common.cluster import MEMBER_NAME, Cluster, ClusterConfig
from tests.support.certificates import Authority, Issued
from tests.support.frontends import client_of, error_of, eventually, generate_request, read_all
from worker_service.config import CacheConfig, NetworkConfig, SimulationConfig, WorkerConfig
from worker_service.errors import InvalidOption
from worker_service.launcher.flags import cluster_config
from worker_service.service.lifecycle import Worker, make_worker
from worker_service.simulated.executor import SimulatedExecutor

TOKEN, OTHER_TOKEN = "t" * 32, "u" * 32
BLOCK_SIZE = 16


def files(ca: Path | None = None, issued: Issued | None = None, token: Path | None = None) -> Any:
    """Arguments that `ClusterConfig` takes."""
    return {
        "token_file": token,
        "ca": ca,
        "cert": issued and issued.cert,
        "key": issued and issued.key,
    }


@asynccontextmanager
async def running_core(**credentials: Any) -> AsyncIterator[CoreService]:
    config = CoreServiceConfig(listen="127.0.0.1:0", cluster=ClusterConfig(**credentials))
    async with make_core_service(config) as core:
        yield core


@asynccontextmanager
async def running_worker(core: str | None, **credentials: Any) -> AsyncIterator[Worker]:
    config = WorkerConfig(
        model=SimulationConfig(),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        network=NetworkConfig(
            listen="127.0.0.1:0", core=core, cluster=ClusterConfig(**credentials)
        ),
    )
    worker = make_worker(config, SimulatedExecutor(config.model, BLOCK_SIZE))
    task = asyncio.create_task(worker.run())
    await worker.ready.wait()
    try:
        yield worker
    finally:
        worker.end_at_once()
        await task


def frontend_with(core: str, credentials: Any) -> Frontend:
    cluster = ClusterConfig(**credentials)
    config = FrontendConfig(core=core, listen="127.0.0.1:0", grace_period_s=0, cluster=cluster)
    return make_frontend(config)


@asynccontextmanager
async def whole(**credentials: Any) -> AsyncIterator[tuple[CoreService, Worker, Frontend]]:
    """All three; the frontend listens without TLS."""
    async with (
        running_core(**credentials) as core,
        running_worker(core.address, **credentials) as worker,
    ):
        frontend = frontend_with(core.address, credentials)
        await frontend.start()
        try:
            yield core, worker, frontend
        finally:
            await frontend.stop()


async def generates(frontend: Frontend) -> None:
    """A request goes all the way to the worker and back."""
    async with client_of(frontend) as client:
        request = generate_request([5, 6, 7], max_tokens=3, ignore_eos=True)
        responses = await read_all(client.Generate(request, timeout=30))
        assert responses[-1].usage.completion_tokens == 3
        status = await client.GetStatus(inference_pb.GetStatusRequest())
        assert status.status.num_finished >= 1


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def write(path: Path, text: str) -> None:
    path.write_text(text)


# With a token.


def internal_calls(core: grpc.aio.Channel, worker: grpc.aio.Channel, **options: Any) -> list[Any]:
    """Every method of both services, and reflection."""
    to_core, to_worker = SchedulerServiceStub(core), WorkerServiceStub(worker)
    requests: dict[str, Any] = {
        "GetModelAssets": scheduler_pb.SchedulerServiceGetModelAssetsRequest(),
        "Abort": scheduler_pb.SchedulerServiceAbortRequest(),
        "GetStatus": scheduler_pb.SchedulerServiceGetStatusRequest(),
        "WatchStatus": scheduler_pb.SchedulerServiceWatchStatusRequest(),
        "DrainWorker": scheduler_pb.DrainWorkerRequest(),
        "LoadAdapter": scheduler_pb.SchedulerServiceLoadAdapterRequest(),
        "UnloadAdapter": scheduler_pb.SchedulerServiceUnloadAdapterRequest(),
        "ListAdapters": scheduler_pb.SchedulerServiceListAdaptersRequest(),
    }
    worker_requests: dict[str, Any] = {
        "GetInfo": worker_pb.GetInfoRequest(),
        "GetModelAssets": worker_pb.WorkerServiceGetModelAssetsRequest(),
        "ProfileBlocks": worker_pb.ProfileBlocksRequest(),
        "InitializeCache": worker_pb.InitializeCacheRequest(),
        "GetCachedBlocks": worker_pb.GetCachedBlocksRequest(),
        "StartProfile": worker_pb.StartProfileRequest(),
        "StopProfile": worker_pb.StopProfileRequest(),
        "LoadAdapter": worker_pb.WorkerServiceLoadAdapterRequest(),
        "GetAdapter": worker_pb.GetAdapterRequest(),
        "ReadBlocks": worker_pb.ReadBlocksRequest(),
        "SetAdapters": worker_pb.SetAdaptersRequest(),
    }
    streams = {"Attach", "RegisterWorker", "ExecuteSteps", "PutAdapter"}
    for descriptor, known in ((scheduler_pb, requests), (worker_pb, worker_requests)):
        service = next(iter(descriptor.DESCRIPTOR.services_by_name.values()))
        assert set(service.methods_by_name) <= {*known, *streams}
    return [
        *(getattr(to_core, rpc)(request, **options) for rpc, request in requests.items()),
        *(getattr(to_worker, rpc)(request, **options) for rpc, request in worker_requests.items()),
        to_core.Attach(**options),
        to_core.RegisterWorker(**options),
        to_worker.ExecuteSteps(**options),
        to_worker.PutAdapter(**options),
        reflection_pb2_grpc.ServerReflectionStub(core).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), **options
        ),
    ]


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", f"Bearer {OTHER_TOKEN}"),),
        (("authorization", f"Bearer {TOKEN}x"),),
        (("authorization", TOKEN),),
    ],
)
async def test_strangers_may_ask_for_health_and_nothing_else(token: Path, metadata: Any) -> None:
    async with (
        whole(**files(token=token)) as (core, worker, _),
        grpc.aio.insecure_channel(core.address) as to_core,
        grpc.aio.insecure_channel(str(worker.address)) as to_worker,
    ):
        for call in internal_calls(to_core, to_worker, metadata=metadata):
            assert (await error_of(call)).code() == grpc.StatusCode.UNAUTHENTICATED
        for channel in (to_core, to_worker):
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(service="liveness"))


async def test_a_worker_without_the_token_never_joins(token: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(OTHER_TOKEN)
    async with (
        running_core(**files(token=token)) as core,
        running_worker(core.address, **files(token=wrong)),
        running_worker(core.address, **files(token=token)) as member,
    ):
        await eventually(lambda: bool(core.registry.served_models()))
        assert [group.group_id for group in core.registry] == [member._config.network.group_id]


async def test_the_token_can_be_changed_while_all_run(token: Path) -> None:
    async with whole(**files(token=token)) as (core, _, frontend):
        await generates(frontend)
        write(token, f"{TOKEN}\n{OTHER_TOKEN}\n")
        async with grpc.aio.insecure_channel(core.address) as channel:
            stub = SchedulerServiceStub(channel)
            for known in (TOKEN, OTHER_TOKEN):
                await stub.GetStatus(
                    scheduler_pb.SchedulerServiceGetStatusRequest(),
                    metadata=(("authorization", f"Bearer {known}"),),
                )
            write(token, f"{OTHER_TOKEN}\n")
            error = await error_of(
                stub.GetStatus(
                    scheduler_pb.SchedulerServiceGetStatusRequest(),
                    metadata=(("authorization", f"Bearer {TOKEN}"),),
                )
            )
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        await generates(frontend)


# With certificates.


@pytest.fixture
def strangers(tmp_path: Path, authority: Authority) -> dict[str, grpc.ChannelCredentials | None]:
    """Whom a member must not let in, by why."""
    foreign = Authority(tmp_path, "theirs").issue("foreign")
    expired = authority.issue("expired", days=-1)
    root = authority.cert.read_bytes()

    def credentials(issued: Issued) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(root, issued.key.read_bytes(), issued.cert.read_bytes())

    return {
        "no TLS": None,
        "no certificate": grpc.ssl_channel_credentials(root),
        "another authority's": credentials(foreign),
        "expired": credentials(expired),
    }


@pytest.mark.parametrize("why", ["no TLS", "no certificate", "another authority's", "expired"])
async def test_strangers_do_not_even_connect(
    authority: Authority, strangers: dict[str, Any], why: str
) -> None:
    credentials = strangers[why]
    member = authority.issue("member")
    named = [("grpc.ssl_target_name_override", MEMBER_NAME)]
    async with whole(**files(authority.cert, member)) as (core, worker, _):
        for address in (core.address, str(worker.address)):
            channel = (
                grpc.aio.insecure_channel(address, named)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, named)
            )
            async with channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                error = await error_of(check(health_pb2.HealthCheckRequest(), timeout=60))
                assert error.code() == grpc.StatusCode.UNAVAILABLE


async def test_members_do_not_talk_to_who_is_none(authority: Authority, tmp_path: Path) -> None:
    """A core whose certificate is of another authority, and one made out to another name."""
    foreign = Authority(tmp_path, "theirs")
    member = authority.issue("member")
    both = tmp_path / "both.pem"  # the impostors would let members in
    both.write_bytes(foreign.cert.read_bytes() + authority.cert.read_bytes())
    for impostor in (foreign.issue("foreign"), authority.issue("named", "elsewhere.example")):
        async with (
            running_core(**files(both, impostor)) as core,
            running_worker(core.address, **files(authority.cert, member)),
        ):
            frontend = frontend_with(core.address, files(authority.cert, member))
            try:
                call = frontend.core.stub.GetStatus(
                    scheduler_pb.SchedulerServiceGetStatusRequest(), timeout=60
                )
                error = await error_of(call)
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                assert list(core.registry) == []
            finally:
                await frontend.core.close()


async def test_new_certificates_on_disk_are_used_without_a_restart(
    authority: Authority, tmp_path: Path
) -> None:
    """The authority changes, too: through a time in which both are good."""
    new = Authority(tmp_path, "new")
    member = authority.issue("member")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.cert.read_bytes())
    async with whole(**files(ca, member)) as (core, worker, frontend):
        await generates(frontend)
        ca.write_bytes(authority.cert.read_bytes() + new.cert.read_bytes())
        later = new.issue("later")
        for file, content in ((member.key, later.key), (member.cert, later.cert)):
            file.write_bytes(content.read_bytes())
        ca.write_bytes(new.cert.read_bytes())
        # A former member is a stranger now, and the new one is let in by all.
        credentials = Cluster(ClusterConfig(**files(ca, member))).channel(core.address, [])
        async with credentials as channel:
            await SchedulerServiceStub(channel).GetStatus(
                scheduler_pb.SchedulerServiceGetStatusRequest(), timeout=60
            )
        for stream in list(core.frontends._streams.values()):
            stream.close(RuntimeError("the test ends the stream"))
        former = frontend.core._channel
        await eventually(lambda: frontend.core._channel is not former)
        await generates(frontend)
        async with grpc.aio.secure_channel(
            str(worker.address),
            grpc.ssl_channel_credentials(new.cert.read_bytes(), *_pair(later)),
            [("grpc.ssl_target_name_override", MEMBER_NAME)],
        ) as channel:
            await WorkerServiceStub(channel).GetInfo(worker_pb.GetInfoRequest(), timeout=60)


LINKS = {
    "none -> ours": "it may expect TLS",
    "ours -> none": "the server does not speak TLS",
    "others -> ours": "no known authority has signed",
    "outdated -> ours": "the server closes the connection",
    "ours -> misnamed": "its certificate is not for that name",
    "wrong token -> token": "is --cluster-token-file the same everywhere?",
}
"""Why the first cannot call the second, by their credentials."""


def credentials_of(name: str, authority: Authority, folder: Path) -> Any:
    if name.endswith("token"):
        path = folder / name.replace(" ", "-")
        path.write_text(OTHER_TOKEN if name.startswith("wrong") else TOKEN)
        return files(token=path)
    if name == "others":
        other = Authority(folder, name)
        return files(other.cert, other.issue("other"))
    host = "elsewhere" if name == "misnamed" else MEMBER_NAME
    issued = authority.issue(f"member-{name}", host, days=-1 if name == "outdated" else 1)
    return files() if name == "none" else files(authority.cert, issued)


def is_explained(caplog: pytest.LogCaptureFixture, words: str, reason: str) -> bool:
    lines = [record.message for record in caplog.records if words in record.message]
    return any(reason in line.partition(" reason=")[2] for line in lines)


@pytest.mark.parametrize("link", LINKS)
async def test_a_service_that_cannot_reach_another_says_which_credentials_differ(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, link: str
) -> None:
    caplog.set_level(logging.INFO)
    caller, called = (credentials_of(name, authority, tmp_path) for name in link.split(" -> "))

    async with running_core(**called) as core, running_worker(core.address, **caller):
        await eventually(lambda: is_explained(caplog, "trying", LINKS[link]))
        caplog.clear()
        frontend = frontend_with(core.address, caller)
        await frontend.start()
        try:
            await eventually(lambda: is_explained(caplog, f" core={core.address} ", LINKS[link]))
        finally:
            await frontend.stop()


@pytest.mark.parametrize("link", [link for link in LINKS if link != "outdated -> ours"])
async def test_a_core_that_cannot_reach_a_worker_says_which_credentials_differ(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, link: str
) -> None:
    caller, called = (credentials_of(name, authority, tmp_path) for name in link.split(" -> "))
    async with running_core(**caller) as core, running_worker(None, **called) as worker:
        model = ModelInfo(
            name="m",
            fingerprint="f",
            max_model_len=64,
            vocab_size=64,
            cache_groups=[CacheGroup(lifetime="CACHE_LIFETIME_GROWING", block_tokens=BLOCK_SIZE)],
        )
        registration = scheduler_pb.WorkerRegistration(
            worker_id="w", group_id="g", world_size=1, address=str(worker.address), model=model
        )
        async with Cluster(ClusterConfig(**caller)).dial(
            SchedulerServiceStub, core.address
        ) as stub:
            stream = stub.RegisterWorker()
            heartbeat = scheduler_pb.WorkerHeartbeat(registration=registration)
            await stream.write(scheduler_pb.RegisterWorkerRequest(heartbeat=heartbeat))
            await eventually(lambda: is_explained(caplog, "worker session failed", LINKS[link]))
            stream.cancel()


async def test_a_core_that_cannot_be_reached_is_a_warning_after_some_seconds(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    member = files(authority.cert, authority.issue("member"))
    async with running_core(**member) as core, running_worker(core.address):
        await eventually(
            lambda: any(
                record.levelname == "WARNING" and "it may expect TLS" in record.message
                for record in caplog.records
            )
        )


def _pair(issued: Issued) -> tuple[bytes, bytes]:
    return issued.key.read_bytes(), issued.cert.read_bytes()


def test_credentials_that_are_no_good_are_refused_at_the_start(
    authority: Authority, tmp_path: Path
) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    short = tmp_path / "short"
    short.write_text("secret")
    wrong = [
        {"ca": authority.cert},
        files(authority.cert, Issued(one.cert, other.key)),
        files(tmp_path / "absent.pem", one),
        files(one.key, one),
        files(token=short),
        files(token=tmp_path / "absent"),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"cluster|tls") as caught:
            ClusterConfig(**arguments)
        assert "secret" not in str(caught.value)
        flags = dict.fromkeys(f"cluster_{field.name}" for field in fields(ClusterConfig))
        flags |= {f"cluster_{name}": value for name, value in arguments.items()}
        with pytest.raises(InvalidOption, match=r"cluster|tls"):
            cluster_config(flags)
