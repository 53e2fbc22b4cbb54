"""The metrics of a real deployment agree with what happened in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire_client import Client, SamplingParams
from scheduler_service.core_service import metrics as core_metrics
from scheduler_service.frontend import metrics as frontend_metrics
from tests.support.cluster import Cluster
from tests.support.scrapes import Scrape, scrape
from tests.support.waiting import wait_until
from worker_service.service import metrics as worker_metrics

METRICS = ("--metrics-port", "0")
NUM_REQUESTS, NUM_CHOICES = 5, 2
PROMPT, NUM_TOKENS = list(range(10, 50)), 12
MODEL = "simulated"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("metrics")
    flags = ["--simulate", "--simulate-step-us", "2000", *METRICS]
    with Cluster(folder, worker_flags=flags, core_flags=METRICS, frontend_flags=METRICS) as cluster:
        cluster.start()
        with Client(cluster.frontend_address()) as client:
            params = SamplingParams(n=NUM_CHOICES, max_tokens=NUM_TOKENS, ignore_eos=True)
            for _ in range(NUM_REQUESTS):
                for _ in client.stream(PROMPT, params):
                    pass
        yield cluster


@pytest.fixture(scope="module")
def of_frontend(cluster: Cluster) -> Scrape:
    return scrape(cluster.frontends[0])


@pytest.fixture(scope="module")
def of_core(cluster: Cluster) -> Scrape:
    return scrape(cluster.core)


@pytest.fixture(scope="module")
def of_worker(cluster: Cluster, of_core: Scrape) -> Scrape:
    """A worker sends a step's result before it counts the step."""
    worker = cluster.workers[0]
    num_steps = of_core.sum("pagewire_group_steps_total")
    wait_until(
        lambda: scrape(worker).sum("pagewire_worker_steps_total") >= num_steps,
        "the last step was counted",
    )
    return scrape(worker)


def test_every_metric_that_is_listed_is_told_and_no_other(
    of_frontend: Scrape, of_core: Scrape, of_worker: Scrape
) -> None:
    for told, listed in (
        (of_frontend, frontend_metrics.ALL),
        (of_core, core_metrics.ALL),
        (of_worker, worker_metrics.ALL),
    ):
        kinds = {metric.name.removesuffix("_total"): str(metric.kind) for metric in listed}
        assert {
            name.removesuffix("_total"): told.kinds[name] for name in told.own_families
        } == kinds


def test_each_process_tells_of_its_memory_and_cpu_time(
    of_frontend: Scrape, of_core: Scrape, of_worker: Scrape
) -> None:
    for told in (of_frontend, of_core, of_worker):
        assert told.sum("process_resident_memory_bytes") > 1e6
        assert told.sum("process_cpu_seconds_total") > 0


def test_a_frontend_counts_requests_tokens_and_ends(of_frontend: Scrape) -> None:
    tokens = NUM_REQUESTS * NUM_CHOICES * NUM_TOKENS
    assert of_frontend.sum("vllm:prompt_tokens_total", model_name=MODEL) == (
        NUM_REQUESTS * len(PROMPT)
    )
    assert of_frontend.sum("vllm:generation_tokens_total", model_name=MODEL) == tokens
    ends = {"length": NUM_REQUESTS * NUM_CHOICES, "stop": 0, "abort": 0, "error": 0}
    for reason, number in ends.items():
        assert of_frontend.sum("vllm:request_success_total", finished_reason=reason) == number
    assert of_frontend.sum("pagewire_requests_total", outcome="ok", tenant="") == NUM_REQUESTS
    assert of_frontend.sum("pagewire_tenant_tokens_total", kind="generated") == tokens
    assert of_frontend.sum("pagewire_frontend_attached") == 1
    assert of_frontend.sum("pagewire_frontend_open_requests") == 0


def test_a_frontend_observes_each_request_once(of_frontend: Scrape) -> None:
    for name in frontend_metrics.OF_MODELS.keys() - {frontend_metrics.TOKEN_GAP}:
        assert of_frontend.sum(f"vllm:{name}_count", model_name=MODEL) == NUM_REQUESTS
    for part in ("queue", "forward", "recovery", "unaccounted"):
        name = "pagewire_request_part_seconds_count"
        assert of_frontend.sum(name, part=part) == NUM_REQUESTS
    assert of_frontend.sum("vllm:request_prompt_tokens_sum") == NUM_REQUESTS * len(PROMPT)
    assert of_frontend.sum("vllm:request_prefill_kv_computed_tokens_sum") == (
        NUM_REQUESTS * len(PROMPT) - (NUM_REQUESTS - 1) * 32
    )
    for limit in ("max_num_generation_tokens", "params_max_tokens"):
        assert of_frontend.sum(f"vllm:request_{limit}_sum") == NUM_REQUESTS * NUM_TOKENS
    # A token of each choice comes first; the others follow one by one, 2 ms apart or more.
    num_gaps = NUM_REQUESTS * NUM_CHOICES * (NUM_TOKENS - 1)
    assert of_frontend.sum("vllm:inter_token_latency_seconds_count") == num_gaps
    assert of_frontend.sum("vllm:inter_token_latency_seconds_sum") >= 0.9 * num_gaps * 0.002


def test_the_core_counts_what_its_caches_and_groups_did(of_core: Scrape) -> None:
    group = {"model_name": MODEL}
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert of_core.sum(name, **group) == 0
    queries = of_core.sum("vllm:prefix_cache_queries_total", **group)
    hits = of_core.sum("vllm:prefix_cache_hits_total", **group)
    assert queries == NUM_REQUESTS * len(PROMPT)
    assert hits == (NUM_REQUESTS - 1) * 32, "two blocks of 16 of each prompt but the first"
    assert of_core.sum("pagewire_delivered_tokens_total", **group) == (
        NUM_REQUESTS * NUM_CHOICES * NUM_TOKENS
    )
    assert of_core.sum("pagewire_copied_blocks_total", **group) == NUM_REQUESTS
    assert of_core.sum("pagewire_group_gpu_blocks", **group) == 4096
    assert of_core.sum("vllm:kv_cache_usage_perc", **group) == 0
    growing = {**group, "cache_group": "0", "lifetime": "growing"}
    assert of_core.sum("pagewire_cache_group_queried_tokens_total", **growing) == queries
    assert of_core.sum("pagewire_cache_group_found_tokens_total", **growing) == hits
    assert of_core.sum("pagewire_cache_group_cached_entries", **growing) > 0
    for name in ("used_blocks", "host_cached_entries"):
        assert of_core.sum(f"pagewire_cache_group_{name}", **growing) == 0
    cache = {"block_size": "16", "num_gpu_blocks": "4096"}
    assert of_core.sum("vllm:cache_config_info", **cache) == 1
    assert of_core.sum("pagewire_group_state", state="ready") == 1
    assert of_core.sum("pagewire_group_state") == 1
    assert of_core.sum("pagewire_worker_registrations_total") == 1
    assert of_core.sum("pagewire_frontends") == 1


def test_core_and_worker_agree_on_their_steps(of_core: Scrape, of_worker: Scrape) -> None:
    steps = of_worker.sum("pagewire_worker_steps_total")
    assert of_core.sum("pagewire_group_steps_total") == steps
    assert of_core.sum("pagewire_step_duration_seconds_count") == steps
    assert of_core.sum("pagewire_plan_bytes_count") == steps
    tokens = of_worker.sum("pagewire_worker_tokens_total")
    assert of_core.sum("vllm:iteration_tokens_total_sum") == tokens
    assert of_worker.sum("pagewire_worker_step_seconds_count") == steps
    forward = sum(
        of_worker.sum("pagewire_worker_step_time_seconds_total", part=part)
        for part in ("cache_ops", "forward")
    )
    # The core attributes no more time to a step than it waited for its result.
    told_by_core = of_core.sum("pagewire_group_time_seconds_total", part="forward")
    assert 0.5 * forward <= told_by_core <= forward
    assert forward >= 0.9 * steps * 0.002
    assert of_worker.sum("pagewire_worker_registered") == 1
    [labels] = of_worker.series("pagewire_worker_info")
    assert (labels["rank"], labels["model_name"], labels["device"]) == ("0", MODEL, "simulated")


def test_a_lost_worker_and_the_requests_that_went_on_are_counted(cluster: Cluster) -> None:
    with Client(cluster.frontend_address()) as client:
        stream = client.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        next(iter(stream))
        cluster.workers[0].kill()
        cluster.start_worker()
        tokens = [token for delta in stream for token in delta.token_ids]
    assert len(tokens) >= 150
    losses = "pagewire_worker_losses_total"
    wait_until(lambda: scrape(cluster.core).sum(losses) == 1, "the loss was counted")
    told = scrape(cluster.core)
    assert told.sum("pagewire_requests_recovered_total") == 1
    assert told.sum("pagewire_group_state") == 1
    assert told.sum("pagewire_worker_registrations_total") == 2
    told = scrape(cluster.frontends[0])
    assert told.sum("pagewire_request_worker_losses_total") == 1
    assert told.sum("pagewire_request_part_seconds_sum", part="recovery") > 0


def test_answers_core_and_worker_agree_on_drafts(tmp_path: Path) -> None:
    flags = ["--simulate", "--speculative", "ngram", *METRICS]
    with Cluster(tmp_path, worker_flags=flags, core_flags=METRICS) as cluster:
        cluster.start()
        with Client(cluster.frontend_address()) as client:
            params = SamplingParams(n=NUM_CHOICES, max_tokens=60, ignore_eos=True)
            answers = [client.generate(PROMPT, params) for _ in range(2)]
        timings = [answer.timings for answer in answers if answer.timings is not None]
        drafts = sum(timing.num_drafts for timing in timings)
        accepted = sum(timing.num_accepted_drafts for timing in timings)
        assert 0 < accepted < drafts
        core, (worker,) = cluster.core, cluster.workers
        assert core is not None
        of_core = scrape(core)
        wait_until(
            lambda: scrape(worker).sum("pagewire_worker_draft_tokens_total") == drafts,
            "the last step was counted",
        )
    assert of_core.sum("vllm:spec_decode_num_draft_tokens_total", model_name=MODEL) == drafts
    assert of_core.sum("vllm:spec_decode_num_accepted_tokens_total") == accepted
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert of_core.sum(by_position) == accepted
    num_rows = of_core.sum("vllm:spec_decode_num_drafts_total")
    assert of_core.sum(by_position, position="0") < num_rows < drafts
