// Runs the cases of the contract (internal/schema/testdata/v1.json) against DATABASE_URL.
import { readFileSync } from "node:fs";
import pg from "pg";
import { metered } from "./metered.js";

interface Case {
  name: string;
  sql?: string;
  call?: string;
  with?: Record<string, unknown>;
  answer?: object;
  error?: string;
  has?: string[];
  lacks?: string[];
}

const cases: Case[] = JSON.parse(readFileSync(process.argv[2], "utf8"));
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 1 });
const db = await pool.connect();
let failed = 0;
for (const c of cases) {
  let said: unknown;
  try {
    const answer = c.sql ? await db.query(c.sql) : await metered(db, c.call!, c.with!);
    said = answer;
    if (c.answer) {
      const { rows } = await db.query("select $1::jsonb @> $2::jsonb as fits", [JSON.stringify(answer), JSON.stringify(c.answer)]);
      if (rows[0].fits && (c.has ?? []).every((m) => m in answer) && (c.lacks ?? []).every((m) => !(m in answer))) continue;
    } else if (!c.error) continue;
  } catch (error) {
    if (c.error && (error as { code?: string }).code === c.error) continue;
    said = error;
  }
  failed++;
  console.error(c.name, said);
}
db.release();
await pool.end();
console.log(`${cases.length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
