from scheduler_service.frontend import metrics
from tests.support.http_frontends import http_served
from tests.support.scrapes import OF_PROMETHEUS_2, Scrape


async def test_a_frontends_metrics_are_on_its_http_port() -> None:
    async with http_served() as served:
        response = await served.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    told = Scrape(response.text)
    names = {metric.name.removesuffix("_total") for metric in metrics.ALL}
    assert {name.removesuffix("_total") for name in told.own_families} == names
    assert told.sum("pagewire_frontend_attached") == 1


async def test_names_have_their_colons_whatever_the_caller_accepts() -> None:
    """OpenMetrics, as the client library writes it, has `vllm_…`."""
    async with http_served() as served:
        response = await served.client.get("/metrics", headers={"Accept": OF_PROMETHEUS_2})
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\n# TYPE vllm:time_to_first_token_seconds histogram\n" in response.text
    assert "\nvllm_" not in response.text
