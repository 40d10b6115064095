import type pg from "pg";

/** The answer of each function v1_*: other members by function. */
export interface Answer {
  ok: boolean;
  code?: string;
  status?: number;
  retry_after?: number;
  [member: string]: unknown;
}

/** Calls a function v1_* with named arguments. An exception is a wrong call, or may pass on another try (40001, 55P03). */
export async function metered(db: pg.Pool | pg.PoolClient, name: string, args: Record<string, unknown>): Promise<Answer> {
  const named = Object.keys(args).map((arg, n) => `${arg} => $${n + 1}`);
  const values = Object.values(args).map((v) => (typeof v === "object" && v !== null ? JSON.stringify(v) : v));
  const { rows } = await db.query(`select metered.${name}(${named.join(", ")}) as answer`, values);
  return rows[0].answer;
}
