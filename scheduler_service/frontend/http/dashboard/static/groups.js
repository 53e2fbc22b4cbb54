// Worker groups: their health, and their memory.

import { BlockMap } from "./blockmap.js";
import { $, element, fillPairs, keyed, setText } from "./dom.js";
import { count, duration, plural, seconds, short } from "./format.js";

const LOST_SHOWN_S = 300;
const MANY = 4; // more groups are drawn smaller, and beside each other where there is room
const inOrder = new Intl.Collator("en", { numeric: true }).compare; // worker-2 before worker-10

// The share of a phase of loading that is done; null while it is not known.
const share = (load) => (load.total_bytes ? load.done_bytes / load.total_bytes : null);

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
      const slowest = loading[load.group_id];
      if (!groups[load.group_id] && !((slowest ? share(slowest) ?? 1 : 1) < (share(load) ?? 0))) loading[load.group_id] = load;
    }
    return loading;
  }

  // Groups of workers that were lost and have not come back.
  #lost(groups) {
    const lost = {};
    for (const loss of this.view.facts.losses ?? []) {
      if (!groups[loss.group_id] && this.view.uptime - loss.lost_at_s < LOST_SHOWN_S) lost[loss.group_id] = loss;
    }
    return lost;
  }

  #make(name) {
    const node = element(
      "article",
      { class: "panel group" },
      element("div", { class: "top" }, element("h3", {}, name), element("p", { class: "state" }, element("span", { class: "dot" }), element("span")), element("p", { class: "quiet" }), element("dl", { class: "facts" })),
      element("dl", { class: "facts cache" }),
      element("div", { class: "maps" }),
    );
    return node;
  }

  #fill(node, name, group) {
    const losses = (this.view.facts.losses ?? []).filter((loss) => loss.group_id === name).length;
    this.#head(node, group.state, `${group.model}${group.world_size > 1 ? `, ${group.world_size} ranks` : ""}`, group.cache_groups);
    fillPairs(node.querySelector(".facts"), [
      ["sequences", `${count(group.num_running_sequences)}${group.max_num_seqs ? ` of ${count(group.max_num_seqs)}` : ""}`],
      ["steps", `${short(group.steps_per_s)} /s`],
      ["step time", group.decode_step_us ? duration(group.decode_step_us / 1000) : "–"],
      ["heartbeat", `${seconds(this.view.uptime - group.last_heartbeat_at_s)} ago`],
      ["losses", count(losses)],
      ["KV moves", group.kv_moves || "–"],
      ...(group.adapters ? [["adapters", group.adapters]] : []),
    ]);
    let maps = this.maps.get(name);
    if (!maps) {
      maps = ["gpu", "cpu"].map((memory) => new BlockMap(this.view, `${name}/${memory}`, memory === "gpu" ? `Device memory, ${plural(group.block_size, "token")} a block` : "Host memory, for what is swapped out", this.choose));
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
      [load.phase, share(load) === null ? "…" : `${Math.floor(100 * share(load))} %`],
      ["left", load.remaining_s == null ? "–" : `about ${duration(load.remaining_s * 1000)}`],
    ]);
    this.maps.delete(name);
    node.querySelector(".maps").replaceChildren(element("p", { class: "quiet" }, "It serves once its model is loaded."));
  }

  #fillLost(node, name, loss) {
    this.#head(node, "lost", loss.model);
    fillPairs(node.querySelector(".facts"), [["lost", `${duration((this.view.uptime - loss.lost_at_s) * 1000)} ago`]]);
    this.maps.delete(name);
    node.querySelector(".maps").replaceChildren(element("p", { class: "quiet" }, "Its requests go on in other groups, or wait for one."));
  }

  // `caches`: [name, use] of cache groups.
  #head(node, state, model, caches = []) {
    fillPairs(node.querySelector(".cache"), caches);
    const [, label, of] = node.querySelector(".top").children;
    label.firstChild.dataset.state = state;
    setText(label.lastChild, state);
    setText(of, model);
  }
}
