"""The dashboard of deployments that are too large for a test: made up, behind a real frontend."""

import re

from playwright.sync_api import Browser, expect

from tests.browser.made_up_status import MadeUpEngine
from tests.browser.smoothness import deployment

PIXELS = """async (number) => {
  const { choose, view } = await import("/dashboard/main.js");
  choose(number);
  const owners = Array.from(view.columns.get("worker-0/gpu/owners"));
  const references = view.columns.get("worker-0/gpu/references");
  const map = document.querySelector(".map");
  const canvas = map.querySelector("canvas");
  const { cell, perRow } = map.dataset;
  const colourOf = (wanted) => {
    const block = owners.findIndex((owner, i) => owner === wanted && references[i] <= 1);
    const at = [(block % perRow) * cell, Math.floor(block / perRow) * cell];
    return Array.from(canvas.getContext("2d").getImageData(...at, 1, 1).data);
  };
  return { cell: Number(cell), own: colourOf(1), other: colourOf(3), empty: colourOf(0) };
}"""


def test_many_workers_stand_beside_each_other_in_the_order_of_their_numbers(
    browser: Browser,
) -> None:
    engine = MadeUpEngine(num_groups=12, num_blocks=500, num_requests=24)
    with deployment(engine) as url:
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.set_default_timeout(60_000)
        page.goto(url)
        groups = page.locator(".group")
        expect(groups).to_have_count(12)
        names = groups.locator("h3").all_inner_texts()
        assert names == [f"worker-{number}" for number in range(12)]
        expect(page.locator(".map-title").first).to_contain_text(re.compile("of 500 blocks"))
        first, second = (groups.nth(index).bounding_box() for index in (0, 1))
        assert first is not None
        assert second is not None
        assert first["y"] == second["y"]
        caches = groups.first.locator(".cache")
        expect(caches).to_contain_text("growing, 16 tokens a block")
        expect(caches).to_contain_text("state, 4 blocks each2 in use, 0 saved, nothing looked up")
        page.close()


def test_cells_that_are_pixels_have_their_requests_colours_and_are_dimmed_beside_a_chosen_one(
    browser: Browser,
) -> None:
    engine = MadeUpEngine(num_groups=2, num_blocks=20_000, num_requests=8, ending=0)
    with deployment(engine) as url:
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.set_default_timeout(60_000)
        page.goto(url)
        expect(page.locator(".map").first).to_have_attribute("data-cell", re.compile("[2-7]"))
        plain = page.evaluate(PIXELS, None)
        assert plain["cell"] < 8
        assert len({tuple(plain[name]) for name in ("own", "other", "empty")}) == 3
        assert [plain[name][3] for name in ("own", "other", "empty")] == [255, 255, 255]
        chosen = page.evaluate(PIXELS, 1)
        assert chosen["own"] == plain["own"]
        assert 0 < chosen["other"][3] < 100
        assert chosen["empty"] == plain["empty"]
        page.close()


def test_a_timeline_says_how_many_drafts_were_accepted_while_decoding(browser: Browser) -> None:
    engine = MadeUpEngine(num_groups=1, num_blocks=500, num_requests=2, ending=0)
    with deployment(engine) as url:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        page.get_by_role("button", name="made-up-request-1").click()
        detail = page.locator("#detail")
        expect(detail.locator(".phase.decode")).to_contain_text("30 of 40 drafts accepted")
        expect(detail.locator(".phase.queued")).not_to_contain_text("drafts")
        expect(detail.locator(".numbers")).to_contain_text("from drafts")
        page.close()


def test_a_deployment_without_anything_says_so(browser: Browser) -> None:
    engine = MadeUpEngine(num_groups=0, num_blocks=0, num_requests=0)
    with deployment(engine) as url:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        expect(page.locator("#groups")).to_contain_text("No worker is registered")
        expect(page.locator("#requests-none")).to_have_text("No request has come yet.")
        page.close()
