// A client in another language: appends, reads, subscribes and invokes; prints one JSON object.
//
//   node client.js PROTO ADDRESS TOKEN
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const [proto, address, token] = process.argv.slice(2);
const { indilog } = grpc.loadPackageDefinition(loader.loadSync(proto, { longs: Number }));
const insecure = grpc.credentials.createInsecure();
const log = new indilog.v1.LogService(address, insecure);
const functions = new indilog.v1.InvokeService(address, insecure);
const metadata = new grpc.Metadata();
metadata.add("authorization", `Bearer ${token}`);

function ask(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, metadata, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

function firstOf(request) {
  return new Promise((resolve, reject) => {
    const stream = log.Subscribe(request, metadata);
    stream.on("data", (page) => {
      resolve(page.records[0]);
      stream.cancel();
    });
    stream.on("error", (error) => {
      if (error.code !== grpc.status.CANCELLED) reject(error);
    });
  });
}

async function main() {
  const name = "from-node";
  const tags = [{ text: "customer:7" }, { number: 12 }];
  const first = await ask(log, "Append", { log: name, data: Buffer.from("one"), tags });
  const batch = await ask(log, "AppendBatch", {
    log: name,
    position: first.position,
    entries: [{ data: Buffer.from("two"), tags }, { data: Buffer.from("three") }],
  });
  const read = await ask(log, "ReadPrev", {
    log: name,
    position: batch.position,
    tag: { text: "customer:7" },
  });
  const streamed = await firstOf({ log: name, position: batch.position, tag: { number: 12 } });
  const { shard } = await ask(log, "LiveShard", { log: name });
  const placed = await ask(log, "AppendToShard", { log: name, shard, data: Buffer.from("four") });
  const refused = await ask(log, "Append", { log: "", data: Buffer.from("") }).catch((e) => e);
  const called = await ask(functions, "Invoke", {
    function: "adder.add",
    arguments: Buffer.from(JSON.stringify({ left: 2, right: 3 })),
  });
  console.log(
    JSON.stringify({
      seqnums: [first.seqnum, ...batch.seqnums],
      placed: (placed.shard || 0) === shard && placed.seqnum > batch.seqnums[1],
      last: read.record.data.toString(),
      tags: read.record.tags.map((tag) => tag.text || tag.number),
      streamed: streamed.data.toString(),
      refused: refused.code,
      result: JSON.parse(called.result.toString()),
    }),
  );
  log.close();
  functions.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
