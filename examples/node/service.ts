import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import pg from "pg";
import { metered, type Answer } from "./metered.js";

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 10 });
const rate = [{ name: "rate", max: Number(process.env.RATE ?? 5), window: "1 minute" }];
const credit = [{ prepaid: true }];

/** The model: as many tokens as the prompt has words, twice. */
const complete = async (prompt: string) => ({ text: prompt.toUpperCase(), tokens: prompt.split(/\s+/).length * 2 });

/** A refusal as the library answers it: its status, its code, and Retry-After where waiting helps. */
function refuse(res: ServerResponse, answer: Answer) {
  if (answer.retry_after) res.setHeader("Retry-After", String(answer.retry_after));
  send(res, answer.status ?? 500, { code: answer.code });
}

function send(res: ServerResponse, status: number, body: object) {
  res.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
}

/** Reserves the most that a request can cost, works, and settles what it did cost. */
async function handle(req: IncomingMessage, res: ServerResponse) {
  const user = req.headers["x-user"];
  const id = req.headers["idempotency-key"];
  if (req.method !== "POST" || typeof user !== "string" || typeof id !== "string") return send(res, 400, { code: "invalid_argument" });
  let prompt = "";
  for await (const chunk of req) prompt += chunk;

  const attempt = await metered(pool, "v1_charge", { scope: `user/${user}/requests`, amount: 1, limits: rate });
  if (!attempt.ok) return refuse(res, attempt);

  const wallet = `user/${user}`;
  const hold = await metered(pool, "v1_hold", { tenant: user, id, scope: wallet, amount: 100, ttl: "2 minutes", limits: credit });
  if (!hold.ok) return refuse(res, hold);
  if (!hold.new) return send(res, 409, { code: `hold_${hold.state}` }); // the request was made before

  try {
    const done = await complete(prompt);
    const settled = await metered(pool, "v1_capture", { tenant: user, id, amount: Math.min(done.tokens, 100), note: { actor: "gateway", correlation: id } });
    if (!settled.ok) return refuse(res, settled); // the work took longer than the hold lasts
    const left = await metered(pool, "v1_balance", { scope: wallet });
    send(res, 200, { text: done.text, tokens: done.tokens, left: left.units });
  } catch (error) {
    await metered(pool, "v1_release", { tenant: user, id, note: { reason: "failed" } }); // else it falls due by itself
    throw error;
  }
}

const server = createServer((req, res) => {
  handle(req, res).catch((error: { code?: string }) => {
    const again = ["40001", "40P01", "55P03"].includes(error.code ?? "");
    if (!again) console.error(error);
    if (again) res.setHeader("Retry-After", "1");
    send(res, again ? 503 : 500, {});
  });
});

server.listen(Number(process.env.PORT ?? 8080), "127.0.0.1", () => console.log(`listening on ${(server.address() as AddressInfo).port}`));
process.on("SIGTERM", () => server.close(() => pool.end()));
