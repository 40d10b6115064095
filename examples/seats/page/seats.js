import { ask, follow } from "./api.js";
import { Cart } from "./cart.js";

const $ = (id) => document.getElementById(id);
const event = document.body.dataset.event;
const { source } = document.body.dataset; // by which one holds seats
const manages = "manages" in document.body.dataset;
const buttons = [...document.querySelectorAll("button.seat")];
const blocks = [...document.querySelectorAll(".block")];
const names = { a: "available", h: "held", s: "sold", b: "blocked" };
const euro = new Intl.NumberFormat("en-IE", { style: "currency", currency: "EUR" });

export const seats = buttons.map((button, index) => {
  const block = button.closest(".block");
  const { id, row, number } = button.dataset;
  return {
    index, id, row, number: Number(number), button, block, section: block.dataset.name, cents: Number(block.dataset.cents),
    state: "", where: `${block.dataset.name} ${row}${number}`, price: euro.format(block.dataset.cents / 100),
  };
});
let map = null; // the last one that came

const cart = new Cart({ seats, euro, event, toast, release, rehold: hold, changed: paint });

function toast(text, warn) {
  const box = document.createElement("p");
  box.className = warn ? "toast warn" : "toast";
  box.textContent = text;
  $("toasts").append(box);
  setTimeout(() => box.remove(), 6000);
}

const minutes = (s) => `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;

const when = (at) => new Date(at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

// sale says in words whether a map's event is on sale.
function sale(next) {
  switch (next.sale) {
    case "open":
      return next.closes ? `on sale until ${when(next.closes)}` : "on sale";
    case "sale_not_open":
      return `on sale from ${when(next.opens)}`;
    case "sale_closed":
      return "sale closed";
  }
  return { draft: "not on sale yet" }[next.status] || next.status;
}

// fill shows a manager how the sale is set, unless they are about to change it.
function fill(next) {
  const form = $("window").elements;
  if ($("window").dataset.touched || $("window").contains(document.activeElement)) return;
  const local = (at) => {
    if (!at) return "";
    const d = new Date(at);
    d.setMinutes(d.getMinutes() - d.getTimezoneOffset());
    return d.toISOString().slice(0, 16);
  };
  form.opens.value = local(next.opens);
  form.closes.value = local(next.closes);
  form.status.value = next.status;
}

// show brings the page to what a map says. Maps are whole: there is nothing to remember of those before.
function show(next) {
  map = next;
  for (const name of ["available", "held", "sold", "blocked"]) $(`n-${name}`).textContent = next.counts[name];
  $("sale").textContent = sale(next);
  next.blocks.forEach((use, i) => {
    const left = Math.max(0, use.capacity - use.taken);
    blocks[i].classList.toggle("full", left === 0);
    blocks[i].querySelector(".room").textContent = left === 0 ? "full" : `${left} of ${use.capacity} left`;
    const input = blocks[i].querySelector(".capacity input");
    if (input && document.activeElement !== input) input.value = use.capacity;
  });
  if (manages) fill(next);
  cart.update(next.mine);
  paint();
}

// paint gives each seat its look and its words.
function paint() {
  if (!map) return;
  for (const seat of seats) {
    const own = cart.of(seat.index);
    let state = names[map.seats[seat.index]];
    if (own) state = own.bought ? "bought" : own.late ? "mine late" : "mine";
    if (seat.state === state) continue;
    seat.state = state;
    const busy = seat.button.classList.contains("busy");
    seat.button.className = `seat ${state}${busy ? " busy" : ""}`;
    const words = { mine: "held for you", "mine late": "held for you, not for much longer", bought: "yours" }[state] || state;
    seat.button.ariaLabel = `${seat.section}, row ${seat.row}, seat ${seat.number}, ${seat.price}, ${words}`;
    seat.button.title = `${seat.where} · ${seat.price} · ${words}`;
    seat.button.ariaPressed = String(Boolean(own));
  }
}

// busy marks a seat while something is asked about it, and keeps a second click from asking again.
async function busy(seat, work) {
  if (seat.button.classList.contains("busy")) return;
  seat.button.classList.add("busy");
  try {
    await work();
  } catch (refusal) {
    toast(why(seat, refusal), true);
  } finally {
    seat.button.classList.remove("busy");
  }
}

function why(seat, refusal) {
  switch (refusal.code) {
    case "seat_held":
      return `Somebody else is holding ${seat.where}. It is free in ${minutes(refusal.seconds)} if they do not buy it.`;
    case "sale_not_open":
      return `The sale begins in ${minutes(refusal.seconds)}.`;
    case "too_many_holds":
      return `That were many seats in a short time. You can hold another one in ${minutes(refusal.seconds)}.`;
    case "hold_expired":
      return `The time for ${seat.where} is over.`;
  }
  return `${seat.where}: ${refusal.message}`;
}

function hold(seat) {
  return busy(seat, async () => {
    const held = await ask("POST", `/api/events/${event}/seats/${seat.id}/hold`, { source });
    cart.add(seat, held);
    paint();
  });
}

function release(seat, id) {
  return busy(seat, async () => {
    cart.leaves(id, true); // and is not paid for, whenever the answer comes
    try {
      await ask("DELETE", `/api/holds/${id}`);
    } catch (refusal) {
      cart.leaves(id, false);
      throw refusal;
    }
    cart.remove(id);
    paint();
  });
}

function block(seat) {
  const what = seat.state === "blocked" ? "unblock" : "block";
  return busy(seat, () => ask("POST", `/api/events/${event}/seats/${seat.id}/${what}`));
}

function click(seat) {
  const own = cart.of(seat.index);
  if ($("blocking")?.checked) return block(seat);
  if (own && !own.bought) return release(seat, own.id);
  if (own) return toast(`${seat.where} is yours.`);
  if (seat.state === "sold" || seat.state === "blocked") return toast(`${seat.where} is ${seat.state}.`);
  return hold(seat); // one that is held too: the answer says for how long
}

// One seat is in the tab order, and the arrow keys move from it.
let current = seats[0];
function focus(seat) {
  current.button.tabIndex = -1;
  current = seat;
  seat.button.tabIndex = 0;
  seat.button.focus();
}

const byButton = new Map(seats.map((seat) => [seat.button, seat]));
document.querySelector(".blocks").addEventListener("click", (e) => {
  const seat = byButton.get(e.target.closest("button.seat"));
  if (!seat) return;
  focus(seat);
  click(seat);
});
document.querySelector(".blocks").addEventListener("keydown", (e) => {
  const seat = byButton.get(e.target);
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
  if (!seat || !steps) return;
  e.preventDefault();
  const next = neighbour(seat, ...steps);
  if (next) focus(next);
});

// neighbour is the seat that one sees on that side: the nearest in that direction, and not far from the line.
function neighbour(from, dx, dy) {
  const a = from.button.getBoundingClientRect();
  let best = null;
  let least = Infinity;
  for (const seat of seats) {
    if (seat === from) continue;
    const b = seat.button.getBoundingClientRect();
    const along = (b.x - a.x) * dx + (b.y - a.y) * dy;
    const aside = Math.abs((b.x - a.x) * dy) + Math.abs((b.y - a.y) * dx);
    if (along < a.width / 2 || aside > a.width * 1.5) continue;
    if (along + 2 * aside < least) [best, least] = [seat, along + 2 * aside];
  }
  return best;
}
current.button.tabIndex = 0;

function set(path, body, words) {
  return ask("PUT", path, body).then(() => toast(words), (refusal) => toast(refusal.message, true));
}
if (manages) {
  $("window").addEventListener("input", () => ($("window").dataset.touched = "yes"));
  $("window").addEventListener("submit", (e) => {
    e.preventDefault();
    delete $("window").dataset.touched;
    const form = e.target.elements;
    const time = (input) => (input.value ? new Date(input.value).toISOString() : null);
    set(`/api/events/${event}`, { status: form.status.value, opens: time(form.opens), closes: time(form.closes) }, "The sale is set.");
  });
  for (const box of blocks) {
    const input = box.querySelector(".capacity input");
    input.addEventListener("change", () => {
      if (input.checkValidity() && input.value !== "") {
        set(`/api/events/${event}/blocks/${box.dataset.block}`, { capacity: Number(input.value) }, `${box.dataset.name}: ${input.value} seats.`);
      }
    });
  }
}

for (const price of document.querySelectorAll(".price[data-cents]")) price.textContent = euro.format(price.dataset.cents / 100);
follow(event, show, (on) => {
  $("live").className = on ? "live on" : "live off";
  $("live-text").textContent = on ? "Live" : "Reconnecting…";
  document.body.classList.toggle("stale", !on);
});
