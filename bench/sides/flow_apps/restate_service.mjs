// Restate's side of `bench.flow_peers`, with its SDK for Node: what restate_service.py does.
//
//   node restate_service.mjs PORT       in a folder whose node_modules has the SDK
import { createRequire } from "node:module";
import { join } from "node:path";

const found = createRequire(join(process.cwd(), "package.json"));
const restate = found("@restatedev/restate-sdk");
const STEPS = 5;

const bench = restate.service({
  name: "bench",
  handlers: {
    noop: async (ctx, number) => number,
    workflow: async (ctx, number) => {
      for (let turn = 0; turn < STEPS; turn++) {
        const before = number;
        number = await ctx.run(`step ${turn}`, () => before + 1);
      }
      return number;
    },
  },
});

const counter = restate.object({
  name: "counter",
  handlers: {
    increment: async (ctx, number) => {
      const before = (await ctx.get("value")) ?? 0;
      ctx.set("value", before + number);
      return before;
    },
  },
});

await restate.serve({ services: [bench, counter], port: Number(process.argv[2]) });
