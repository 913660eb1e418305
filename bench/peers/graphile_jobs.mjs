// graphile-worker (Node). BENCH_VARIANT: `batch`, its local queue and batched completion, or `8`, eight jobs at once.
// What it understands is said in program.py; its packages are those of NODE_PATH.
import fs from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const require = createRequire(process.env.NODE_PATH + "/");
const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const { Pool } = require("pg");

const SLEEP_MS = 5_000;
const A_STATEMENT = 1_000;
const VARIANTS = {
  8: { concurrentJobs: 8, maxPoolSize: 10 },
  batch: {
    concurrentJobs: 24,
    maxPoolSize: 25,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
  },
};

const logger = new Logger(() => () => {});
const now = () => (performance.timeOrigin + performance.now()) / 1_000;
const mark = ({ number }) =>
  fs.appendFileSync(process.env.BENCH_MARKS, `${number} ${now().toFixed(6)} ${process.pid}\n`);
const taskList = {
  noop: () => {},
  mark,
  sleep: async (payload) => {
    mark(payload);
    await sleep(SLEEP_MS);
  },
};

async function work() {
  const worker = VARIANTS[process.env.BENCH_VARIANT];
  const pgPool = new Pool({ max: worker.maxPoolSize });
  pgPool.on("error", () => {});
  await (await run({ pgPool, taskList, logger, preset: { worker } })).promise;
}

async function enqueue(utils, [word, ...rest]) {
  const began = performance.now();
  const count = Number(rest[0]);
  const said = () => console.log((performance.now() - began) / 1_000);
  if (word === "schema") await utils.migrate();
  else if (word === "one") await utils.addJob(rest[0], { number: Number(rest[1]) });
  else if (word === "single") {
    for (let number = 0; number < count; number++) await utils.addJob("noop", { number });
    said();
  } else if (word === "bulk") {
    for (let first = 0; first < count; first += A_STATEMENT) {
      const size = Math.min(A_STATEMENT, count - first);
      await utils.addJobs(
        Array.from({ length: size }, (_, at) => ({ identifier: "noop", payload: { number: first + at } })),
      );
    }
    said();
  } else if (word === "steadily") await steadily(utils, count, Number(rest[1]), Number(rest[2]), rest[3]);
  else throw new Error(`unknown: ${word}`);
}

async function steadily(utils, first, count, perSecond, file) {
  const began = performance.now();
  const sent = [];
  for (let number = first; number < first + count; number++) {
    await sleep(Math.max(0, began + ((number - first) * 1_000) / perSecond - performance.now()));
    await utils.addJob("mark", { number });
    sent.push(`${number} ${now().toFixed(6)}\n`);
  }
  fs.writeFileSync(file, sent.join(""));
}

const words = process.argv.slice(2);
if (words[0] === "worker") await work();
else {
  const pgPool = new Pool({ max: 4 });
  pgPool.on("error", () => {});
  const utils = await makeWorkerUtils({ pgPool, logger });
  await enqueue(utils, words);
  await utils.release();
  await pgPool.end();
}
