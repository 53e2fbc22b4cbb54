"""The scheduler core as a process: flags, signals, a taken port, garbage."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_service.core_service.service import SERVICE_NAME
from service_common.end_signals import SAME_REQUEST_S
from tests.support.attached_frontend import AttachedFrontend
from tests.support.fake_worker import FakeWorker, counted
from tests.support.waiting import until
from tools.launch import environment


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scheduler_service",
        *arguments,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def run(*arguments: str) -> tuple[int | None, str]:
    """Exit code and output of a command that ends by itself."""
    process = await start(*arguments)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@asynccontextmanager
async def running(folder: Path, *flags: str) -> AsyncIterator[tuple[Process, str]]:
    """A core that listens on a unix socket, and its address."""
    address = f"unix:{folder}/core.sock"
    process = await start("scheduler", "--listen", address, *flags)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert "INFO" in line
        assert f"listening address={address}" in line
        yield process, address
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def counting_worker(core_address: str) -> AsyncIterator[FakeWorker]:
    """A worker in this process, registered with a core in another."""
    worker = FakeWorker()
    await worker.start(core_address)
    try:
        yield worker
    finally:
        await worker.kill()


async def health(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status


async def test_without_a_command_it_shows_both() -> None:
    _, output = await run()
    assert "scheduler" in output
    assert "frontend" in output


async def test_a_flag_out_of_range_is_one_clear_line() -> None:
    code, output = await run("scheduler", "--step-timeout", "20", "--step-timeout-factor", "0.5")
    assert code == 2
    assert output.startswith("error: --step-timeout-factor: expected")
    assert output.count("\n") == 1


async def test_kv_that_is_to_move_without_a_prefix_cache_is_one_clear_line() -> None:
    code, output = await run("scheduler", "--move-kv", "always", "--no-enable-prefix-caching")
    assert code == 2
    assert (
        output
        == "error: --move-kv: expected auto or never with --no-enable-prefix-caching, got always\n"
    )


async def test_a_wrong_file_of_tenants_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.acme]\nmax_requests = -1\n")
    code, output = await run("scheduler", "--policy", "fair", "--tenants", str(path))
    assert code == 2
    assert output == (
        f"error: --tenants: {path}: tenants.acme: max_requests: expected at least 1, got -1\n"
    )


async def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, output = await run("scheduler", "--listen", address)
    assert code == 1
    assert output == f"error: cannot listen on {address}: address already in use\n"


async def test_a_megabyte_of_garbage_leaves_the_service_healthy(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, address):
        _, writer = await asyncio.open_unix_connection(f"{tmp_path}/core.sock")
        # Hanging up on garbage is right.
        with suppress(BrokenPipeError, ConnectionResetError):
            writer.write(os.urandom(1 << 20))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(address, "liveness") == health_pb2.HealthCheckResponse.SERVING
        async with counting_worker(address), AttachedFrontend(address) as frontend:
            await frontend.submit(1, [1, 2], max_tokens=4)
            await frontend.wait_finished(1)
            assert frontend.tokens[1] == counted(2, 4)
            assert await health(address) == health_pb2.HealthCheckResponse.SERVING
        assert process.returncode is None


async def test_reflection_lists_the_service(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, address), grpc.aio.insecure_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await call.read()).list_services_response.service
        assert {service.name for service in listed} >= {SERVICE_NAME, "grpc.health.v1.Health"}
        call.cancel()


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, address):
        async with counting_worker(address) as worker, AttachedFrontend(address) as frontend:
            await frontend.submit(1, [1, 2], max_tokens=100)
            await frontend.wait_tokens(1, 3)
            worker.hold_results()
            process.send_signal(signal.SIGTERM)
            await until_not_serving(address)
            await frontend.submit(2, [1, 2])
            failed = await frontend.wait_failed(2)
            assert (failed.code, failed.reason) == (14, "SHUTTING_DOWN")
            worker.may_answer.set()
            await frontend.wait_finished(1)
            assert frontend.tokens[1] == counted(2, 100)
            await until(lambda: frontend.end, "the stream ended")
            assert frontend.end is not None
            assert frontend.end.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert worker.stop_reason is None, "the worker looks for the next core"


async def until_not_serving(address: str) -> None:
    """Follow the health service until it says NOT_SERVING."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for response in call:
            if response.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return


async def test_requests_that_outlive_the_grace_period_lose_their_stream(tmp_path: Path) -> None:
    async with running(tmp_path, "--grace-period", "0.1") as (process, address):
        async with counting_worker(address) as worker, AttachedFrontend(address) as frontend:
            await frontend.submit(1, [1, 2], max_tokens=100)
            await frontend.wait_tokens(1, 3)
            worker.hold_results()
            process.send_signal(signal.SIGHUP)
            await until(lambda: frontend.end, "the stream ended")
            assert frontend.end is not None
            assert frontend.end.code() == grpc.StatusCode.UNAVAILABLE
            assert 1 not in frontend.finished
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as (process, address),
        counting_worker(address) as worker,
        AttachedFrontend(address) as frontend,
    ):
        await frontend.submit(1, [1, 2], max_tokens=100)
        await frontend.wait_tokens(1, 3)
        worker.hold_results()
        process.send_signal(signal.SIGTERM)
        await until_not_serving(address)
        await asyncio.sleep(SAME_REQUEST_S)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 128 + signal.SIGINT


async def test_a_socket_left_behind_by_a_killed_core_is_taken_over(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, _):
        process.kill()
        await process.wait()
        assert (tmp_path / "core.sock").exists()
    async with running(tmp_path) as (_, address):
        assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_flags_can_be_set_by_the_environment(
    tmp_path: Path,
) -> None:
    env = environment() | {"PAGEWIRE_LISTEN": "nowhere"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scheduler_service",
        "scheduler",
        env=env,
        stderr=asyncio.subprocess.PIPE,
    )
    _, output = await process.communicate()
    assert process.returncode == 2
    assert b"'nowhere'" in output
