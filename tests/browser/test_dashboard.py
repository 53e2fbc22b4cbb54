"""The dashboard in a browser, over real services under load."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from pagewire_client import Client, SamplingParams
from scheduler_service.columns import from_column
from tests.browser.chromium import AXE
from tests.browser.conftest import SHARED, OpenPage
from tests.browser.deployment import Deployment

OWNERS = """async ([group, memory]) => {
  const { view } = await import("/dashboard/main.js");
  return Array.from(view.columns.get(`${group}/${memory}/owners`) ?? []);
}"""
COLOURS = """async (blocks) => {
  const map = document.querySelector(".map");
  const canvas = map.querySelector("canvas");
  const { cell, perRow } = map.dataset;
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return blocks.map((block) => {
    const corner = [(block % perRow) * cell, Math.floor(block / perRow) * cell];
    const [x, y] = corner.map((v) => Math.round((v + 1) * devicePixelRatio));
    const at = 4 * (y * canvas.width + x);
    return Array.from(all.data.slice(at, at + 4));
  });
}"""
HEIGHTS = """(text) => {
  const nodes = (selector) => [...document.querySelectorAll(selector)];
  const heights = (selector) => nodes(selector).map((node) => node.offsetHeight);
  for (const value of nodes(".chart .legend b")) value.textContent = text ?? value.textContent;
  return { charts: heights(".chart"), legends: heights(".chart .legend") };
}"""
"""Heights of the charts, with this text as each value; null: with the present ones."""
DESCRIBED = """async (caches) => {
  const { BlockMap } = await import("/dashboard/blockmap.js");
  const view = {
    facts: { groups: { g: { block_size: 16, cache_groups: caches } } },
    columns: new Map([["g/gpu/owners", [0, 1, 1]], ["g/gpu/references", [0, 1, 1]]]),
    tables: new Map([["1/gpu", [[1, 2]]]]),
    request: () => ({ request_id: "mine", group_id: "g" }),
  };
  return new BlockMap(view, "g/gpu", "", () => {}).describe(2);
}"""
"""What is said of the second block of a request, in a worker group with these cache groups."""
BLOCK_SIZE = 16


def place_of(page: Page, block: int) -> dict[str, float]:
    """Where a block is within the first map."""
    data = page.locator(".map").first.evaluate("map => ({...map.dataset})")
    cell, per_row = float(data["cell"]), int(data["perRow"])
    return {"x": (block % per_row + 0.5) * cell, "y": (block // per_row + 0.5) * cell}


def shared_block(deployment: Deployment) -> int:
    """A block that the four prompts with a common beginning share."""
    references = deployment.status().groups[0].gpu_blocks.num_references
    return references.index(4)


def test_charts_show_rates_and_latencies(open_page: OpenPage) -> None:
    page = open_page()
    throughput = page.locator(".chart .value").first
    expect(throughput).to_have_text(re.compile(r"[1-9][\d.]* ?output tokens/s"), timeout=60_000)
    between = page.locator(".chart").nth(2).locator(".value")
    expect(between).to_have_text(re.compile(r"(2|3|4|5|6|7)\d\d ms"), timeout=60_000)
    expect(page.locator(".chart").nth(3).locator(".value")).to_contain_text("7")
    page.get_by_text("Charts as a table").click()
    expect(page.locator("#charts-table tbody tr").nth(1)).to_be_visible()


def test_the_block_map_is_the_cores(open_page: OpenPage, deployment: Deployment) -> None:
    page = open_page()
    for _ in range(200):
        group = deployment.status().groups[0]
        wanted = from_column(group.gpu_blocks.owners, "owners")
        if page.evaluate(OWNERS, ["worker-0", "gpu"]) == wanted:
            break
        page.wait_for_timeout(100)
    else:
        raise AssertionError("the page never showed the core's status")
    assert group.num_gpu_blocks == 512
    used = next(block for block, owner in enumerate(wanted) if owner > 0)
    empty = len(wanted) - 1 - wanted[::-1].index(0)
    page.wait_for_timeout(300)
    colours = page.evaluate(COLOURS, [used, empty])
    assert colours[0] != colours[1]
    assert [colour[3] for colour in colours] == [255, 255]
    title = page.locator(".map-title").first
    in_use = sum(owner > 0 for owner in wanted)
    expect(title).to_contain_text(re.compile(rf"({in_use}|{in_use + 1}|{in_use + 2}) of 512"))


def test_a_shared_block_tells_who_shares_it(open_page: OpenPage, deployment: Deployment) -> None:
    page = open_page()
    expect(page.locator(".map-title").first).to_contain_text(re.compile("[1-9]\\d* shared"))
    page.locator(".map").first.hover(position=place_of(page, shared_block(deployment)))  # type: ignore[arg-type]
    tip = page.locator("#tip")
    expect(tip).to_contain_text("shared by 4 sequences")
    expect(tip).to_contain_text("tokens 0 to 15")
    num_shared = list(deployment.status().groups[0].gpu_blocks.num_references).count(4)
    assert num_shared == len(SHARED) // BLOCK_SIZE


def test_a_block_has_a_place_where_tables_begin_with_the_first_token(open_page: OpenPage) -> None:
    page = open_page()
    for caches, place in (
        ([["growing, 16 tokens a block", ""]], ", tokens 16 to 31"),
        ([["window 64, 16 tokens a block", ""]], ""),
        ([["growing, 16 tokens a block", ""], ["window 64, 16 tokens a block", ""]], ""),
    ):
        assert page.evaluate(DESCRIBED, caches) == f"Block 2: mine{place}"


def test_a_request_has_a_timeline(open_page: OpenPage, deployment: Deployment) -> None:
    page = open_page()
    row = page.locator("#requests tbody tr").first
    row.locator("button").click()
    expect(row).to_have_attribute("data-chosen", "")
    detail = page.locator("#detail")
    for words in ("queued with", "given to worker-0", "first token", "between tokens"):
        expect(detail).to_contain_text(words)
    expect(detail.locator(".track .decode")).to_be_visible()
    request_id = row.locator("button span").nth(1).inner_text()
    known = {request.request_id: request for request in deployment.status().requests}
    expect(detail).to_contain_text(f"{known[request_id].num_prompt_tokens}")
    page.keyboard.press("Escape")
    expect(detail).to_contain_text("Choose a request")


def test_a_click_anywhere_in_a_request_s_row_opens_its_timeline(open_page: OpenPage) -> None:
    page = open_page()
    row = page.locator("#requests tbody tr").first
    detail = page.locator("#detail")
    for cell in row.locator("th, td").all():
        cell.click()
        expect(row).to_have_attribute("data-chosen", "")
        expect(detail).to_contain_text("queued with")
        cell.click()
        expect(detail).to_contain_text("Choose a request")
    for key in ("Enter", "Space"):
        row.get_by_role("button").press(key)
        expect(detail).to_contain_text("queued with")
        row.get_by_role("button").press(key)
        expect(detail).to_contain_text("Choose a request")
    phone = open_page(390, 700, has_touch=True)
    phone.locator("#requests tbody tr").first.locator("td").first.tap()
    expect(phone.locator("#detail")).to_contain_text("queued with")


def test_an_ended_request_has_a_duration_and_its_colour_in_the_list_as_in_the_title(
    open_page: OpenPage, deployment: Deployment
) -> None:
    with Client(deployment.cluster.frontend_address()) as client:
        client.generate([7, 8, 9], SamplingParams(max_tokens=2), request_id="short")
    page = open_page()
    expect(page.locator("#requests thead th").last).to_have_text("Duration")
    expect(page.locator("#requests-count")).to_contain_text(
        re.compile(r"7 live; since the core.s start .* ago: [1-9]\d* requests? ended")
    )
    row = page.locator("#requests tbody tr", has_text="short")
    duration = row.locator("td").last.inner_text()
    row.click()
    expect(row).to_have_class("ended")
    expect(page.locator(".numbers div", has_text="duration").locator("dd")).to_have_text(duration)
    colour = "swatch => getComputedStyle(swatch).backgroundColor"
    in_list = row.locator(".swatch").evaluate(colour)
    assert in_list == page.locator("#detail-title .swatch").evaluate(colour)


@pytest.mark.parametrize("width", [390, 1100, 1440])
def test_charts_stay_equally_high_however_long_their_values_are(
    open_page: OpenPage, width: int
) -> None:
    page = open_page(width)
    measured = page.evaluate(HEIGHTS, None)
    assert len(set(measured["charts"])) == 1
    assert page.evaluate(HEIGHTS, "59 min 59 s") == measured


def test_columns_outside_the_view_are_announced_where_there_are_any(open_page: OpenPage) -> None:
    page = open_page()
    table, hint = page.locator(".scroll:has(#requests)"), page.locator("#more-columns")
    seen = set()
    for width in (320, 390, 585, 590, 600, 621, 768, 1090, 1440):
        page.set_viewport_size({"width": width, "height": 800})
        is_wider = table.evaluate("table => table.scrollWidth > table.clientWidth")
        expect(hint).to_be_visible(visible=is_wider)
        seen.add(is_wider)
    assert seen == {True, False}


def test_the_map_is_worked_by_keys(open_page: OpenPage) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to memory")).to_be_focused()
    while not page.evaluate("document.activeElement.classList.contains('map')"):
        page.keyboard.press("Tab")
    expect(page.locator("#tip")).to_contain_text("Block 0")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("Block 1:")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("#detail")).to_contain_text("queued with")
    page.keyboard.press("Tab")
    expect(page.locator("#tip")).to_have_text("Block 0: free, empty")  # of host memory
    page.keyboard.press("Tab")
    expect(page.locator("#tip")).to_be_hidden()


def test_light_and_dark_follow_the_system_and_the_button(open_page: OpenPage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    colours = light.evaluate(background), dark.evaluate(background)
    assert colours[0] != colours[1]
    for _ in range(2):
        light.locator("#theme").click()
    expect(light.locator("#theme")).to_have_text("Theme: dark")
    assert light.evaluate(background) == colours[1]
    light.reload()
    expect(light.locator("#theme")).to_have_text("Theme: dark")


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_cut_off_on_a_small_screen(open_page: OpenPage, width: int) -> None:
    page = open_page(width, 700, has_touch=True)
    page.locator(".pick").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_request_that_is_tapped_on_a_phone_is_scrolled_to(open_page: OpenPage) -> None:
    page = open_page(390, 700, has_touch=True)
    expect(page.locator("#detail")).not_to_be_in_viewport()
    page.locator(".pick").first.click()
    expect(page.locator("#detail .track")).to_be_in_viewport()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_accessibility_rules_find_nothing(open_page: OpenPage, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: `npm ci` in tests/browser installs it")
    page = open_page(color_scheme=scheme)
    page.get_by_text("Charts as a table").click()
    page.locator(".pick").first.click()
    page.evaluate(AXE.read_text())
    found: Any = page.evaluate("axe.run()")
    assert found["violations"] == [], json.dumps(found["violations"], indent=1)[:4_000]


def test_a_lost_worker_is_told_of_and_so_is_the_next(
    open_page: OpenPage, deployment: Deployment
) -> None:
    page = open_page()
    deployment.cluster.workers[-1].kill()
    group = page.locator(".group")
    expect(group).to_contain_text("lost", timeout=60_000)
    row = page.locator("#requests tbody tr", has_text="recovering").first
    row.click()
    colour = "state => getComputedStyle(state).color"
    in_title = page.locator("#detail .numbers dd").first
    expect(in_title).to_have_text("recovering")
    in_list = row.locator("td").first.evaluate(colour)
    assert in_title.evaluate(colour) == in_list != row.locator("td").nth(1).evaluate(colour)
    row.click()
    deployment.start_worker("worker-0")
    expect(group).to_contain_text("ready", timeout=90_000)
    expect(group).to_contain_text("losses1")
    page.locator(".pick").first.click()
    expect(page.locator("#detail")).to_contain_text("its worker was lost")


def test_the_page_goes_on_with_the_next_core(open_page: OpenPage, deployment: Deployment) -> None:
    page = open_page()
    assert deployment.cluster.core is not None
    deployment.cluster.core.kill()
    banner = page.locator("#banner")
    expect(banner).to_contain_text("scheduler core", timeout=60_000)
    expect(page.locator("#connection")).to_have_text("connection lost")
    deployment.cluster.start_core()
    expect(banner).to_be_hidden(timeout=90_000)
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#requests")).to_contain_text("decoding", timeout=90_000)
    page.locator(".pick").first.click()
    expect(page.locator("#detail")).to_contain_text("resumed after a loss")


def test_a_key_is_asked_for_until_one_is_good(browser: Browser, deployment: Deployment) -> None:
    def answer(route: Route) -> None:
        shown = route.request.headers.get("authorization")
        if shown == "Bearer good":
            route.continue_()
        else:
            body = json.dumps({"error": {"message": f"{shown} is unknown"}})
            route.fulfill(status=401, content_type="application/json", body=body)

    context = browser.new_context()
    page = context.new_page()
    page.route("**/dashboard/stream", answer)
    page.goto(deployment.url)
    told = page.locator("#login p")
    expect(told).to_have_text(re.compile("^An operator.s key stays in this tab"))
    for key, why in (("bad", "Bearer bad is unknown"), ("k\u2026y", "characters that no key has")):
        page.locator("#key").fill(key)
        page.get_by_role("button", name="Open").click()
        expect(told).to_contain_text(why)
        expect(page.locator("#main")).to_be_hidden()
    page.locator("#key").fill("good")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#main")).to_be_visible()
    expect(page.locator("#login")).to_be_hidden()
    context.close()
