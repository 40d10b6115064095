// Requests that may be repeated without harm: each has a key, and is tried again with it until there is an answer.

export class Refusal extends Error {
  constructor(status, body) {
    super(body.detail || "That did not work.");
    this.status = status;
    this.code = body.code || "";
    this.seconds = body.retry_after_seconds || 0;
  }
}

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

// ask sends a request and returns the body of its answer. It throws a Refusal.
export async function ask(method, path, body) {
  const key = newKey();
  for (let attempt = 1; ; attempt++) {
    let answer;
    try {
      answer = await fetch(path, {
        method,
        headers: { "Idempotency-Key": key, ...(body && { "Content-Type": "application/json" }) },
        body: body && JSON.stringify(body),
      });
    } catch {
      answer = null; // the way there or back is broken: it may have arrived
    }
    if (answer && answer.status !== 503) {
      const told = await answer.json().catch(() => ({}));
      if (answer.ok) return told;
      if (answer.status === 401) location.assign("/");
      throw new Refusal(answer.status, told);
    }
    if (attempt === 8) throw new Refusal(503, { detail: "The server cannot be reached. Please try again." });
    await wait(Math.min(500 * attempt, 3000));
  }
}

function newKey() {
  if (crypto.randomUUID) return crypto.randomUUID();
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

// follow calls onMap with each map of an event's stream, and onState with whether it is connected. It never gives up.
export function follow(event, onMap, onState) {
  let heard = performance.now();
  let source;
  const connect = () => {
    source = new EventSource(`/api/events/${event}/stream`);
    source.onmessage = (e) => {
      heard = performance.now();
      onState(true);
      onMap(JSON.parse(e.data));
    };
    source.onerror = () => {
      onState(false);
      if (source.readyState !== EventSource.CLOSED) return; // it tries again by itself
      setTimeout(async () => {
        const answer = await fetch(`/api/events/${event}/map`).catch(() => null);
        if (answer && answer.status === 401) location.assign("/");
        connect();
      }, 1500);
    };
  };
  connect();
  // After a sleep, or on the way back to this page: what has been missed comes with the next map, so ask for one.
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && performance.now() - heard > 20000) {
      source.close();
      heard = performance.now();
      connect();
    }
  });
}
