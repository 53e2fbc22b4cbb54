"""The worker's registration. Requires `--core-listen`; at the end the worker is stopped."""

from itertools import pairwise

from conformance.assertions import Skipped, expect, expect_true
from conformance.case import case
from conformance.registration_server import LEASE_MS, RegistrationServer, TimedHeartbeat
from conformance.worker import Worker
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2

NUM_HEARTBEATS = 3
END_TIMEOUT_S = 20.0


def registration_server_of(worker: Worker) -> RegistrationServer:
    """The worker's registration; skips the case without one."""
    if worker.registration_server is None:
        raise Skipped("needs --core-listen and a worker that registers there")
    return worker.registration_server


def next_heartbeats(worker: Worker, count: int) -> list[TimedHeartbeat]:
    """This many heartbeats that arrive from now on."""
    server = registration_server_of(worker)
    so_far = len(server.wait_for_heartbeats(1, worker.timeout_s))
    return server.wait_for_heartbeats(so_far + count, worker.timeout_s)[so_far:]


@case("scheduler_service", "In the stream's first message only.")
def the_first_heartbeat_carries_the_registration(worker: Worker) -> None:
    heartbeats = registration_server_of(worker).wait_for_heartbeats(2, worker.timeout_s)
    carries = [heartbeat.heartbeat.HasField("registration") for heartbeat in heartbeats]
    expect("heartbeats with a registration", carries[:2], [True, False])


@case("scheduler_service", "The identity and properties of a worker.")
def the_registration_is_complete(worker: Worker) -> None:
    registration = registration_server_of(worker).wait(worker.timeout_s)
    for field in ("worker_id", "group_id", "address", "version"):
        expect_true(bool(getattr(registration, field)), f"registration.{field} is empty")
    expect_true(registration.world_size >= 1, "registration.world_size is 0")
    expect_true(registration.rank < registration.world_size, "registration.rank is too large")


@case("scheduler_service", "The loaded model.")
def the_registration_says_what_get_info_says(worker: Worker) -> None:
    registration = registration_server_of(worker).wait(worker.timeout_s)
    expect("registration.worker_id", registration.worker_id, worker.info.worker_id)
    expect("registration.model", registration.model, worker.info.model)


@case("scheduler_service", "Time without a heartbeat after which the worker counts as lost")
def heartbeats_keep_the_lease(worker: Worker) -> None:
    moments = [heartbeat.at_s for heartbeat in next_heartbeats(worker, NUM_HEARTBEATS)]
    longest_s = max(later - earlier for earlier, later in pairwise(moments))
    expect_true(
        longest_s * 1000 < LEASE_MS,
        f"expected one within the lease of {LEASE_MS} ms, got one after {longest_s * 1000:.0f} ms",
    )


@case("scheduler_service", "Steps executed since the process started.")
def heartbeats_count_steps(worker: Worker) -> None:
    counts = []
    for number, num_steps in ((1, 3), (2, 5)):
        with worker.open() as stream:
            for _ in range(num_steps):
                stream.prefilled(worker.prompt(number))
        counts.append(next_heartbeats(worker, 2)[-1].heartbeat.num_steps)
    expect("steps counted while 5 were executed", counts[1] - counts[0], 5)


@case("scheduler_service", "STARTING, READY or DRAINING")
def a_worker_that_serves_says_ready(worker: Worker) -> None:
    last = registration_server_of(worker).wait_for_heartbeats(1, worker.timeout_s)[-1].heartbeat
    expect("state", last.state, status_pb2.WORKER_STATE_READY)


@case("scheduler_service", "Finish running sequences and accept no new ones.")
def a_draining_worker_finishes_running_sequences(worker: Worker) -> None:
    server = registration_server_of(worker)
    worker.alone(worker.prompt(1), 4)  # while new caches can still be made
    with worker.open() as stream:
        sequence = stream.generate(stream.new(worker.prompt(1)), 2)
        server.send(pb.WorkerDirective(drain=pb.Drain()))
        # One heartbeat may have been in flight.
        state = next_heartbeats(worker, 2)[-1].heartbeat.state
        expect("state after the directive", state, status_pb2.WORKER_STATE_DRAINING)
        stream.generate(sequence, 2)
    worker.expect_as_alone("a sequence that ran when the worker was drained", sequence)


@case("scheduler_service", "Exit.")
def a_stopping_worker_ends_its_stream(worker: Worker) -> None:
    server = registration_server_of(worker)
    server.send(pb.WorkerDirective(stop=pb.Stop(reason="the conformance kit is done")))
    ended = server.wait_for_end(END_TIMEOUT_S)
    expect_true(ended, f"the registration's stream was still open after {END_TIMEOUT_S:g} s")
