"""The worker under test: its facts, new epochs, and its undisturbed sequences."""

import math
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property

import grpc

from conformance.assertions import Failed, expect, expect_true
from conformance.cache_groups import block_tokens, num_blocks
from conformance.credentials import NO_CREDENTIALS, Credentials
from conformance.generation import Generation, expect_same
from conformance.registration_server import RegistrationServer
from conformance.sequence import GREEDY, Sequence
from conformance.step_call import Refusal
from conformance.step_stream import StepStream
from conformance.vocabulary import special_texts, token_texts
from pagewire.v1 import context_pb2, model_pb2, sampling_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub

MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
"""The largest batch that the cases plan, sent to the worker when it profiles its blocks."""

TOLERANCE = 1e-3
"""Maximum difference of a vector's numbers, relative to its norm."""

MAX_GPU_BLOCKS = 1024
MAX_CPU_BLOCKS = 64
"""Number of blocks that the cases use, if the worker has as many."""

POLL_S = 0.1
"""Polling interval while a worker loads its model."""

SEED = 20
"""Seed of the kit's prompts, which are the same in every run."""


@contextmanager
def _naming(call: str, address: str) -> Iterator[None]:
    """Raise Failed for an error of the first calls, without which no case can run."""
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise Failed(f"no worker responds at {address} to {call}: {details}") from error
        raise Failed(
            f"the worker at {address} responds to {call} with {code.name}: {details}; every case"
            f" needs {call}"
        ) from error


def expect_near(what: str, found: list[float], wanted: list[float]) -> None:
    """Fail unless two vectors agree but for rounding."""
    expect(f"numbers of {what}", len(found), len(wanted))
    distance, norm = math.dist(found, wanted), math.hypot(*wanted)
    expect_true(distance <= TOLERANCE * norm, f"{what}: expected {wanted}, got {found}")


class Worker:
    """A worker that listens at an address."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        registration_server: RegistrationServer | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout_s`: of each call and step stream. `on_wait`: called if no worker responds yet.
        Raises Failed, naming the call, without an answer."""
        self.address = address
        self.timeout_s = timeout_s
        self.registration_server = registration_server
        """The core's side of its registration, if it registered with the kit."""
        self.channel = credentials.channel(address)
        self.stub = WorkerServiceStub(self.channel)
        with _naming("GetInfo", address):
            self.info = self._wait_until_loaded(on_wait)
        self.is_fresh = self.info.last_epoch == 0
        """Whether no core used the worker before the kit."""
        with _naming("ProfileBlocks", address):
            self.blocks = self.stub.ProfileBlocks(
                pb.ProfileBlocksRequest(
                    max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
                ),
                timeout=timeout_s,
            )
        self.epoch = self.info.last_epoch
        """The greatest epoch used."""
        self.keeps_blocks = False
        """Whether it keeps what is cached for the next core, once it has caches."""
        self._alone: dict[tuple[object, ...], Generation] = {}

    @property
    def groups(self) -> list[model_pb2.CacheGroup]:
        """The model's cache groups."""
        return list(self.info.model.cache_groups)

    @property
    def block_size(self) -> int:
        """Tokens per block of the main group. Raises Skipped without groups."""
        return block_tokens(self.groups)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of a sequence of `num_tokens` tokens, none of them released."""
        return sum(num_blocks(group, num_tokens) for group in self.groups)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.info.model.vocab_size

    @cached_property
    def token_texts(self) -> list[bytes]:
        """Texts by token id. Raises Failed without tokenizer.json, Skipped for an unknown kind."""
        return token_texts(self._tokenizer_json, self.vocab_size)

    @cached_property
    def special_texts(self) -> dict[int, bytes]:
        """The contents of special tokens, by id. Raises Failed without tokenizer.json."""
        return special_texts(self._tokenizer_json)

    @cached_property
    def _tokenizer_json(self) -> bytes:
        chunks = (response.chunk for response in self.model_assets())
        data = b"".join(chunk.data for chunk in chunks if chunk.file_name == "tokenizer.json")
        if not data:
            raise Failed("there is no tokenizer.json among the model's files")
        return data

    def get_info(self) -> pb.GetInfoResponse:
        """The worker's identity."""
        return self.stub.GetInfo(pb.GetInfoRequest(), timeout=self.timeout_s)

    def model_assets(self) -> Iterator[pb.WorkerServiceGetModelAssetsResponse]:
        """The model's files, in chunks."""
        request = pb.WorkerServiceGetModelAssetsRequest()
        call: Iterator[pb.WorkerServiceGetModelAssetsResponse]
        call = self.stub.GetModelAssets(request, timeout=self.timeout_s)
        return call

    def _wait_until_loaded(self, on_wait: Callable[[], None]) -> pb.GetInfoResponse:
        """The worker's identity, once it has a model."""
        deadline = time.monotonic() + self.timeout_s
        is_waiting = False
        while True:
            try:
                return self.get_info()
            except grpc.RpcError as error:
                is_late = time.monotonic() > deadline
                if error.code() is not grpc.StatusCode.UNAVAILABLE or is_late:
                    raise
            if not is_waiting:
                on_wait()
            is_waiting = True
            time.sleep(POLL_S)

    def next_epoch(self) -> int:
        """An epoch greater than any before."""
        self.epoch += 1
        return self.epoch

    def cache_request(self, epoch: int) -> pb.InitializeCacheRequest:
        """Caches of the size that the cases use."""
        return pb.InitializeCacheRequest(
            num_gpu_blocks=min(self.blocks.num_gpu_blocks, MAX_GPU_BLOCKS),
            num_cpu_blocks=min(self.blocks.num_cpu_blocks, MAX_CPU_BLOCKS),
            epoch=epoch,
        )

    def initialize(self, epoch: int) -> None:
        """Create the caches."""
        response = self.stub.InitializeCache(self.cache_request(epoch), timeout=self.timeout_s)
        self.keeps_blocks = response.keeps_blocks

    def stream(self, epoch: int) -> StepStream:
        """A step stream of an epoch, without new caches."""
        return StepStream(
            self.stub, self.cache_request(epoch), model=self.info.model, timeout_s=self.timeout_s
        )

    def open(self) -> StepStream:
        """New caches in a new epoch, and its stream."""
        epoch = self.next_epoch()
        self.initialize(epoch)
        return self.stream(epoch)

    def prompt(self, number: int, num_tokens: int | None = None) -> list[int]:
        """Random tokens, the same for the same number; by default two and a half blocks."""
        if num_tokens is None:
            num_tokens = max(5 * self.block_size // 2, 6) if self.groups else 40
        generator = random.Random(1000 * SEED + number)
        return [generator.randrange(self.vocab_size) for _ in range(num_tokens)]

    def alone(
        self,
        prompt: Collection[int],
        num_tokens: int,
        sampling: sampling_pb2.SamplerParams = GREEDY,
        choice_index: int = 0,
        context: tuple[context_pb2.ContextPart, ...] = (),
    ) -> Generation:
        """The tokens that a sequence samples without others on the worker, its prompt in one
        chunk."""
        messages = tuple(message.SerializeToString() for message in (sampling, *context))
        key = (tuple(prompt), num_tokens, choice_index, messages)
        if key not in self._alone:
            fields = {"sampling": sampling, "choice_index": choice_index, "context": context}
            with self.open() as session:
                sequence = session.new(prompt, **fields)
                self._alone[key] = Generation(session.generate(sequence, num_tokens).sampled)
        return self._alone[key]

    def expect_as_alone(self, what: str, sequence: Sequence) -> None:
        """Fail unless a sequence sampled the same tokens on its stream as without others, or
        brought the same vector."""
        if sequence.pooling is not None:
            self._expect_vector(what, sequence)
            return
        found = Generation(sequence.sampled)
        start = len(sequence.output) - sum(token >= 0 for token in found.tokens)
        alone = self.alone(
            sequence.tokens[: sequence.num_prompt_tokens],
            start + len(found.steps),
            sequence.sampling,
            sequence.choice_index,
            sequence.context,
        )
        expect_same(what, found, alone.after(start), exact=self.info.model.batch_invariant)

    def _expect_vector(self, what: str, sequence: Sequence) -> None:
        with self.open() as stream:
            other = stream.new(sequence.tokens, pooling=sequence.pooling)
            wanted, found = stream.generate(other, 1).vector or [], sequence.vector or []
        expect_near(what, found, wanted)
        if self.info.model.batch_invariant:
            expect(what, found, wanted)

    def expect_healthy(self) -> None:
        """Fail unless a new epoch works and gives the same tokens."""
        with self.open() as session:
            sequence = session.new(self.prompt(0))
            session.generate(sequence, 2)
        self.expect_as_alone("a sequence in a new epoch", sequence)

    def refusal(self, call: Callable[..., object], request: object) -> Refusal:
        """The status of a call that must not succeed."""
        try:
            call(request, timeout=self.timeout_s)
        except grpc.RpcError as error:
            return Refusal(error.code(), error.details() or "")
        raise Failed("expected the call to be refused, it succeeded")
