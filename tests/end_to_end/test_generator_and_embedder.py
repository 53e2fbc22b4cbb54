"""A generator and an embedder side by side on one core, each with a worker group of its own.

The workers are simulated: real processes with real streams, and plans that are checked.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pagewire.columns import unpack_floats
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import model_pb2, pooling_pb2
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.cluster import Cluster
from tests.support.requests import fold, inference_stub, reason, request_for
from tests.support.waiting import wait_until

GENERATOR, EMBEDDER = "simulated", "embedder"
NUM_TEXTS = 300
VECTOR_SIZE = 16
ALL = pooling_pb2.POOLING_TYPE_ALL


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("both")
    core_flags = ["--max-num-seqs", "32", "--max-num-batched-tokens", "256"]
    with Cluster(folder, worker_flags=["--simulate"], core_flags=core_flags) as cluster:
        cluster.start()
        flags = ("--simulate-cache-groups", "none", "--served-model-name", EMBEDDER)
        cluster.start_worker(*flags)
        with inference_stub(cluster.frontend_address()) as stub:
            wait_until(lambda: len(models(stub)) == 2, "both models are served")
        yield cluster


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[InferenceServiceStub]:
    with inference_stub(cluster.frontend_address()) as stub:
        yield stub


def models(stub: InferenceServiceStub) -> list[str]:
    return list(stub.GetStatus(pb.GetStatusRequest()).status.models)


def text(number: int) -> list[int]:
    return [1 + (31 * number + 7 * place) % 30_000 for place in range(1 + number % 97)]


def embed(
    stub: InferenceServiceStub, numbers: range, type: pooling_pb2.PoolingType.ValueType
) -> list[list[float]]:
    """The vectors of some texts, in one call."""
    request = pb.EmbedRequest(options={"model": EMBEDDER}, embed={"type": type})
    for number in numbers:
        request.inputs.add().token_ids.ids.extend(text(number))
    found: dict[int, list[float]] = {}
    for response in stub.Embed(iter([request]), timeout=60):
        for entry in response.embeddings:
            assert not entry.HasField("error")
            found.setdefault(entry.index, []).extend(unpack_floats(entry.values))
    return [found[index] for index in range(len(numbers))]


def generate(stub: InferenceServiceStub, number: int) -> list[int]:
    request = request_for(text(number), temperature=0.0, max_tokens=40, ignore_eos=True)
    request.model = GENERATOR
    return fold(stub.Generate(request, timeout=60)).token_ids


def test_each_gets_what_it_gets_alone_while_the_other_works(stub: InferenceServiceStub) -> None:
    alone = [generate(stub, number) for number in range(8)]
    vectors = embed(stub, range(NUM_TEXTS), pooling_pb2.POOLING_TYPE_MEAN)
    with ThreadPoolExecutor(16) as pool:
        of_all = pool.submit(embed, stub, range(NUM_TEXTS), ALL)
        again = pool.submit(embed, stub, range(NUM_TEXTS), pooling_pb2.POOLING_TYPE_MEAN)
        tokens = list(pool.map(lambda number: generate(stub, number), range(8)))
        assert tokens == alone
        assert again.result() == vectors
        sizes = [len(values) for values in of_all.result()]
    assert sizes == [VECTOR_SIZE * len(text(number)) for number in range(NUM_TEXTS)]
    assert all(len(vector) == VECTOR_SIZE for vector in vectors)


def test_the_embedder_is_listed_without_blocks_and_with_what_it_does(
    stub: InferenceServiceStub,
) -> None:
    info = stub.GetModel(pb.GetModelRequest(model=EMBEDDER)).model
    assert list(info.work_kinds) == [model_pb2.WORK_KIND_POOLING]
    status = stub.GetStatus(pb.GetStatusRequest()).status
    groups = {group.model: group for group in status.groups}
    embedder = groups[EMBEDDER]
    assert (embedder.num_gpu_blocks, embedder.num_free_gpu_blocks, embedder.block_size) == (0, 0, 0)
    assert embedder.num_steps > 0
    assert groups[GENERATOR].num_gpu_blocks == groups[GENERATOR].num_free_gpu_blocks > 0


def test_generation_of_the_embedder_is_refused(stub: InferenceServiceStub) -> None:
    request = request_for([1, 2, 3])
    request.model = EMBEDDER
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(request, timeout=60))
    assert reason(error.value) == "WORK_KIND_UNSUPPORTED"
