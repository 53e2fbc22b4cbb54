from scheduler_service.frontend import metric_list
from tests.support.http_frontends import http_served
from tests.support.scrapes import Scrape


async def test_a_frontends_metrics_are_on_its_http_port() -> None:
    async with http_served() as served:
        response = await served.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    told = Scrape(response.text)
    names = {metric.name.removesuffix("_total") for metric in metric_list.ALL}
    assert {name.removesuffix("_total") for name in told.own_families} == names
    assert told.sum("pagewire_frontend_attached") == 1


async def test_whoever_accepts_openmetrics_gets_it() -> None:
    async with http_served() as served:
        accept = "application/openmetrics-text; version=1.0.0"
        response = await served.client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
