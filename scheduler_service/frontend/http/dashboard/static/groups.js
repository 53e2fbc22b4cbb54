// Worker groups: their health, and their memory.

import { BlockMap } from "./blockmap.js";
import { $, element, fillPairs, keyed, setText } from "./dom.js";
import { count, duration, plural, seconds, short } from "./format.js";

const LOST_SHOWN_S = 300;
const MANY = 4; // more groups are drawn smaller, and beside each other where there is room
const inOrder = new Intl.Collator("en", { numeric: true }).compare; // worker-2 before worker-10

export class Groups {
  constructor(view, choose) {
    this.view = view;
    this.choose = choose;
    this.maps = new Map();
  }

  draw() {
    const groups = this.view.facts.groups ?? {};
    const loading = this.#loading(groups);
    const lost = this.#lost({ ...groups, ...loading });
    const names = [...Object.keys(groups), ...Object.keys(loading), ...Object.keys(lost)].sort(inOrder);
    $("groups").toggleAttribute("data-many", names.length > MANY);
    for (const node of keyed($("groups"), names, (name) => this.#make(name))) {
      const name = node.dataset.key;
      if (groups[name]) this.#fill(node, name, groups[name]);
      else if (loading[name]) this.#fillLoading(node, name, loading[name]);
      else this.#fillLost(node, name, lost[name]);
    }
    for (const name of this.maps.keys()) if (!names.includes(name)) this.maps.delete(name);
    if (!names.length) $("groups").replaceChildren(element("p", { class: "panel nothing" }, "No worker is registered. Requests wait until one joins."));
  }

  mark(number) {
    for (const maps of this.maps.values()) for (const map of maps) map.mark(number);
  }

  redraw() {
    for (const maps of this.maps.values()) for (const map of maps) map.draw(true);
  }

  // The slowest rank of each group whose workers load their model.
  #loading(groups) {
    const loading = {};
    for (const load of Object.values(this.view.facts.loading ?? {})) {
      const slowest = loading[load.group];
      if (!groups[load.group] && !((slowest?.share ?? 1) < (load.share ?? 0))) loading[load.group] = load;
    }
    return loading;
  }

  // Groups of workers that were lost and have not come back.
  #lost(groups) {
    const lost = {};
    for (const loss of this.view.facts.losses ?? []) {
      if (!groups[loss.group] && this.view.uptime - loss.at < LOST_SHOWN_S) lost[loss.group] = loss;
    }
    return lost;
  }

  #make(name) {
    const node = element(
      "article",
      { class: "panel group" },
      element("div", { class: "top" }, element("h3", {}, name), element("p", { class: "state" }, element("span", { class: "dot" }), element("span")), element("p", { class: "quiet" }), element("dl", { class: "facts" })),
      element("div", { class: "maps" }),
    );
    return node;
  }

  #fill(node, name, group) {
    const losses = (this.view.facts.losses ?? []).filter((loss) => loss.group === name).length;
    this.#head(node, group.state, `${group.model}${group.ranks > 1 ? `, ${group.ranks} ranks` : ""}`);
    fillPairs(node.querySelector(".facts"), [
      ["sequences", `${count(group.sequences)}${group.maxSequences ? ` of ${count(group.maxSequences)}` : ""}`],
      ["steps", `${short(group.stepsPerS)} /s`],
      ["step time", group.decodeUs ? duration(group.decodeUs / 1000) : "–"],
      ["heartbeat", `${seconds(this.view.uptime - group.heartbeatAt)} ago`],
      ["losses", count(losses)],
    ]);
    let maps = this.maps.get(name);
    if (!maps) {
      maps = ["gpu", "cpu"].map((memory) => new BlockMap(this.view, `${name}/${memory}`, memory === "gpu" ? `Device memory, ${plural(group.blockSize, "token")} a block` : "Host memory, for what is swapped out", this.choose));
      this.maps.set(name, maps);
      node.querySelector(".maps").replaceChildren(...maps.map((map) => map.root));
    }
    for (const map of maps) {
      map.root.hidden = !map.owners.length;
      if (!map.root.hidden) map.draw();
    }
  }

  #fillLoading(node, name, load) {
    this.#head(node, "starting", load.model);
    fillPairs(node.querySelector(".facts"), [
      [load.phase, load.share === null ? "…" : `${Math.floor(100 * load.share)} %`],
      ["left", load.remaining === null ? "–" : `about ${duration(load.remaining * 1000)}`],
    ]);
    this.maps.delete(name);
    node.querySelector(".maps").replaceChildren(element("p", { class: "quiet" }, "It serves once its model is loaded."));
  }

  #fillLost(node, name, loss) {
    this.#head(node, "lost", loss.model);
    fillPairs(node.querySelector(".facts"), [["lost", `${duration((this.view.uptime - loss.at) * 1000)} ago`]]);
    this.maps.delete(name);
    node.querySelector(".maps").replaceChildren(element("p", { class: "quiet" }, "Its requests go on in other groups, or wait for one."));
  }

  #head(node, state, model) {
    const [, label, of] = node.querySelector(".top").children;
    label.firstChild.dataset.state = state;
    setText(label.lastChild, state);
    setText(of, model);
  }
}
