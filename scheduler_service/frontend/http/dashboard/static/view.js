// All data of the page, kept up to date by the changes that the server sends (view.py).

const MAX_RUNS = 10_000; // that are kept for the next drawing, which a hidden page puts off for hours

export class View {
  constructor() {
    this.clear();
  }

  clear() {
    this.facts = {};
    this.columns = new Map(); // "group/gpu/owners" -> Int32Array
    this.tables = new Map(); // "number/gpu" -> arrays of blocks, one per sequence
    this.points = [];
    this.fields = [];
    this.uptime = 0;
    this.touched = new Map(); // column -> [start, count] runs, or "all", since the last drawing
  }

  // Applies one message. "all" replaces everything.
  apply(message) {
    if (message.all) {
      this.clear();
      this.fields = message.fields;
      this.points = message.points;
      this.touched.set("*", "all");
    }
    this.uptime = message.uptime;
    this.receivedAt = performance.now();
    if (message.facts) this.facts = merge(this.facts, message.facts);
    for (const [name, runs] of Object.entries(message.columns ?? {})) this.#column(name, runs);
    for (const [name, tables] of Object.entries(message.tables ?? {})) this.#tables(name, tables);
    if (message.point) {
      this.points.push(message.point);
      const oldest = message.point[0] - 600;
      while (this.points[0][0] < oldest) this.points.shift();
    }
  }

  // The core's uptime in seconds, now.
  now() {
    return this.uptime + (performance.now() - this.receivedAt) / 1000;
  }

  request(number) {
    return this.facts.requests?.[number] ?? this.facts.ended?.[number];
  }

  #column(name, runs) {
    if (runs === null) {
      this.columns.delete(name);
      return;
    }
    let column = this.columns.get(name);
    const touched = this.touched.get(name) ?? [];
    if (column?.length !== runs[0]) {
      column = new Int32Array(runs[0]);
      this.columns.set(name, column);
      this.touched.set(name, "all");
    }
    for (let i = 1; i < runs.length; i += 3) {
      column.fill(runs[i + 2], runs[i], runs[i] + runs[i + 1]);
      if (touched !== "all") touched.push(runs[i], runs[i + 1]);
    }
    if (this.touched.get(name) !== "all") this.touched.set(name, touched.length > MAX_RUNS ? "all" : touched);
  }

  #tables(name, changed) {
    if (changed === null) {
      this.tables.delete(name);
      return;
    }
    const former = this.tables.get(name) ?? [];
    this.tables.set(name, changed.map((change, i) => spliced(former[i] ?? [], change)));
  }
}

// The first `keep` entries of a table, which mostly grows, and those that follow.
function spliced(table, [keep, ...rest]) {
  table.length = keep;
  for (const block of rest) table.push(block);
  return table;
}

// A JSON merge patch (RFC 7396), in place.
function merge(target, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete target[name];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const former = target[name];
      const known = former && typeof former === "object" && !Array.isArray(former);
      target[name] = merge(known ? former : {}, value);
    } else target[name] = value;
  }
  return target;
}
