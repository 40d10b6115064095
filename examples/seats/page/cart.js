import { ask } from "./api.js";

const $ = (id) => document.getElementById(id);
const warnAt = 30; // seconds

const clock = (s) => `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;

// Cart is what one holds, with a clock for each seat. Clocks count what the server said was left, by performance.now():
// the time of day in a browser may be wrong.
export class Cart {
  constructor(hall) {
    this.hall = hall;
    this.items = new Map(); // by the hold's id
    this.paying = false;
    $("pay").addEventListener("click", () => this.pay());
    $("fold").addEventListener("click", () => {
      const open = $("cart").classList.toggle("open");
      $("fold").ariaExpanded = String(open);
    });
    setInterval(() => this.tick(), 250);
  }

  // of is what one has of the seat with an index.
  of(index) {
    for (const item of this.items.values()) {
      if (item.seat.index === index && !item.over) return item;
    }
    return null;
  }

  add(seat, held) {
    this.put(held.hold_id, seat, held.expires_in_seconds * 1000, false, new Date(held.held_until).getTime());
    this.draw();
  }

  put(id, seat, left, bought, until) {
    const ends = performance.now() + left;
    const item = this.items.get(id);
    if (!item) {
      for (const [old, other] of this.items) if (other.seat === seat) this.items.delete(old); // its last try
      this.items.set(id, { id, seat, ends, until, span: Math.max(left, 1), bought, late: false, over: false, fresh: performance.now() });
    } else {
      item.bought = bought;
      if (item.until !== until) [item.ends, item.until] = [ends, until];
      else item.ends = Math.min(item.ends, ends); // an answer that was long on its way has the end too late
    }
  }

  // leaves says whether what one has is about to be given back.
  leaves(id, yes) {
    const item = this.items.get(id);
    if (item) item.leaving = yes;
    this.draw();
  }

  remove(id) {
    this.items.delete(id);
    this.draw();
  }

  // update brings the cart to what the server says one has.
  update(mine) {
    const told = new Set();
    for (const own of mine) {
      told.add(own.hold_id);
      this.put(own.hold_id, this.hall.seats[own.seat], own.left_ms, own.status === "sold", new Date(own.held_until || 0).getTime());
    }
    for (const [id, item] of this.items) {
      // What was added by an answer may not be in a map that was on its way already.
      if (told.has(id) || item.over || item.leaving || performance.now() - item.fresh < 2000) continue;
      if (item.ends - performance.now() < 5000) this.end(item);
      else if (!this.paying) this.items.delete(id); // given back in another tab, or taken by the box office
    }
    this.draw();
  }

  end(item) {
    if (item.over) return;
    item.over = true;
    $("alarm").textContent = `The time for ${item.seat.where} is over.`;
    this.hall.changed();
  }

  tick() {
    let drawn = false;
    for (const item of this.items.values()) {
      if (item.over && performance.now() - item.ends > 120000) {
        this.items.delete(item.id); // it has been seen
        drawn = true;
      }
      if (item.bought || item.over || item.leaving) continue;
      const left = Math.ceil((item.ends - performance.now()) / 1000);
      if (left <= warnAt && !item.late) {
        item.late = drawn = true;
        $("alarm").textContent = `${Math.max(left, 0)} seconds left for ${item.seat.where}.`;
        this.hall.changed();
      }
      if (left <= 0) {
        this.end(item);
        drawn = true;
      }
    }
    if (drawn) this.draw();
    else this.clocks();
  }

  live() {
    return [...this.items.values()].filter((item) => !item.bought && !item.over && !item.leaving);
  }

  clocks() {
    let first = Infinity;
    for (const item of this.live()) {
      const left = Math.max(0, Math.ceil((item.ends - performance.now()) / 1000));
      first = Math.min(first, left);
      if (!item.element) continue;
      item.element.querySelector(".clock").textContent = clock(left);
      item.element.querySelector("progress").value = left * 1000;
    }
    $("first-clock").textContent = first === Infinity ? "" : clock(first);
    $("fold").classList.toggle("late", first <= warnAt);
  }

  draw() {
    const { euro } = this.hall;
    const items = [...this.items.values()].sort((a, b) => a.seat.index - b.seat.index);
    const live = this.live();
    const tickets = items.filter((item) => item.bought);
    $("holds").replaceChildren(...items.filter((item) => !item.bought).map((item) => this.element(item)));
    $("tickets").replaceChildren(...tickets.map((item) => this.element(item)));
    $("tickets-title").hidden = tickets.length === 0;
    $("empty").hidden = items.length > 0;
    const total = euro.format(live.reduce((sum, item) => sum + item.seat.cents, 0) / 100);
    const count = `${live.length} ${live.length === 1 ? "seat" : "seats"}`;
    $("summary").textContent = live.length ? `${count} · ${total}` : tickets.length ? `${tickets.length} bought` : "No seats yet";
    $("pay").hidden = live.length === 0 && !this.paying;
    $("pay").disabled = this.paying;
    $("pay").textContent = this.paying ? "Paying…" : `Pay ${total} for ${count}`;
    this.clocks();
  }

  element(item) {
    const state = item.bought ? "ticket" : item.leaving ? "leaving" : item.over ? "over" : item.late ? "late" : "";
    const kind = `item ${state}`;
    if (item.element && item.kind === kind) return item.element;
    const make = (name, className, text) => Object.assign(document.createElement(name), { className, textContent: text });
    const li = make("li", kind, "");
    li.dataset.hold = item.id;
    li.append(make("span", "where", item.seat.where), make("span", "price", item.seat.price));
    if (item.bought || item.leaving) {
      li.append(make("span", "clock", item.bought ? "✓" : "giving back…"));
    } else {
      li.append(make("span", "clock", item.over ? "run out" : ""));
      const button = make("button", "", item.over ? "Again" : "Remove");
      button.type = "button";
      button.ariaLabel = item.over ? `Hold ${item.seat.where} again` : `Give back ${item.seat.where}`;
      button.addEventListener("click", () => (item.over ? this.hall.rehold(item.seat) : this.hall.release(item.seat, item.id)));
      li.append(button);
      if (!item.over) li.append(Object.assign(document.createElement("progress"), { max: item.span, value: item.span, ariaLabel: "Time left" }));
    }
    [item.element, item.kind] = [li, kind];
    return li;
  }

  async pay() {
    const live = this.live();
    if (this.paying || live.length === 0) return;
    this.paying = true;
    this.draw();
    try {
      const order = await ask("POST", `/api/events/${this.hall.event}/checkout`, { holds: live.map((item) => item.id) });
      for (const item of live) item.bought = true;
      $("bought-text").textContent = `${live.map((item) => item.seat.where).join(", ")}, ${this.hall.euro.format(order.cents / 100)}. Your order is ${order.order_id.slice(-6).toUpperCase()}.`;
      $("bought").showModal();
    } catch (refusal) {
      const words = refusal.code === "hold_expired" ? "The time for a seat ran out. Nothing was paid, and the others are still yours." : refusal.message;
      this.hall.toast(words, true);
    } finally {
      this.paying = false;
      this.hall.changed();
      this.draw();
    }
  }
}
