"""The requests of a hostile page against a platform: everything that a browser lets a page send.

`ATTACK` is JavaScript that runs in that page; it returns what it could read. `MODES` are those of
`fetch`, `KINDS` the content types that a body may claim; null: none. `silent` is the number of
milliseconds after which it no longer waits for an answer.
"""

from __future__ import annotations

from typing import Final

SOURCE: Final = """
import indilog
app = indilog.App("evil")

@app.function
async def run() -> int:
    return 1
"""

MODES: Final = ["cors", "no-cors"]
KINDS: Final = [
    None,
    "text/plain",
    "application/x-www-form-urlencoded",
    "application/json",
    "text/x-python",
    "application/octet-stream",
    "multipart/form-data; boundary=x",
]
ATTACK: Final = """async ({gateway, source, modes, kinds, silent}) => {
  const seen = [];
  const note = (what, text) => seen.push([what, String(text).slice(0, 2000)]);
  const trying = async (what, attempt) => {
    try { note(what, await attempt()); } catch (error) { note(what, "failed: " + error); }
  };
  const within = (promise) => Promise.race([
    promise, new Promise((_, reject) => setTimeout(() => reject("silent"), silent)),
  ]);
  const sources = JSON.stringify({sources: {"evil.py": source}});
  const bodies = [
    ["POST", "/functions/edge/touch", "{}"], ["POST", "/functions/edge/touch", undefined],
    ["POST", "/functions/edge/touch?async=1", "{}"], ["POST", "/functions/edge/hook", "{}"],
    ["POST", "/apps", source], ["POST", "/apps", sources], ["PUT", "/apps/evil", source],
    ["PUT", "/apps/evil", sources], ["DELETE", "/apps/evil", undefined],
    ["POST", "/logs/edge/records", '{"data": "evil"}'], ["POST", "/logs/edge/trim", '{"until": 0}'],
    ["PUT", "/logs/edge/retention", '{"age_s": 86400}'], ["POST", "/session/codes", undefined],
  ];
  const reads = ["/apps", "/status", "/metrics", "/docs", "/openapi.json", "/logs/edge/records",
    "/logs/edge/tail", "/login"];
  for (const mode of modes)
    for (const credentials of ["include", "omit"])
      for (const path of reads)
        await trying(`${mode} GET ${path}`, async () => {
          const answer = await within(fetch(gateway + path, {mode, credentials}));
          return answer.status + " " + await answer.text();
        });
  for (const mode of modes)
    for (const credentials of ["include", "omit"])
      for (const [method, path, body] of bodies)
        for (const kind of kinds) {
          if (body === undefined && kind !== null) continue;
          if (mode === "no-cors" && method !== "POST") continue;
          // A blob without a type is sent without a Content-Type.
          const sent = body === undefined ? undefined : kind ? body : new Blob([body]);
          const headers = kind ? {"content-type": kind} : {};
          await trying(`${mode} ${method} ${path} ${kind}`, async () => {
            const answer = await within(
              fetch(gateway + path, {method, mode, credentials, body: sent, headers}));
            return answer.status + " " + await answer.text();
          });
        }
  await trying("beacon", () => navigator.sendBeacon(gateway + "/apps", source) && "queued");
  await trying("beacon of a form", () => navigator.sendBeacon(
    gateway + "/functions/edge/touch", new URLSearchParams({a: "b"})) && "queued");
  for (const path of ["/client", "/logs/edge/stream"])
    await trying("socket " + path, () => within(new Promise((resolve, reject) => {
      const socket = new WebSocket(gateway.replace("http", "ws") + path);
      socket.binaryType = "arraybuffer";
      socket.onmessage = (event) => resolve("OPENED " + event.data);
      socket.onopen = () => resolve("OPENED");
      socket.onerror = () => reject("refused");
    })));
  await trying("events", () => within(new Promise((resolve, reject) => {
    const events = new EventSource(gateway + "/logs/edge/stream?bound=0", {withCredentials: true});
    events.onmessage = (event) => resolve("OPENED " + event.data);
    events.onerror = () => { events.close(); reject("refused"); };
  })));
  for (const [tag, attribute] of [["script", "src"], ["img", "src"], ["iframe", "src"],
      ["object", "data"], ["embed", "src"], ["video", "src"]])
    for (const path of ["/apps", "/docs"])
      await trying(`${tag} ${path}`, () => within(new Promise((resolve, reject) => {
        const node = document.createElement(tag);
        node[attribute] = gateway + path;
        node.onload = () => {
          const inner = () => node.contentDocument ? node.contentDocument.body.innerHTML : "";
          try { resolve("loaded " + inner()); }
          catch (error) { reject(error); }
        };
        node.onerror = () => reject("refused");
        document.body.append(node);
      })));
  for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
    for (const [path, name] of [["/apps", source], ["/functions/edge/touch", '{"a": "'],
        ["/logs/edge/records", '{"data": "evil", "tags": ["']])
      await trying(`form ${enctype} ${path}`, () => within(new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.name = "f" + Math.random();
        document.body.append(frame);
        const form = document.createElement("form");
        Object.assign(form, {method: "POST", enctype, action: gateway + path, target: frame.name});
        const input = document.createElement("input");
        input.name = name;
        input.value = '"]}';
        form.append(input);
        document.body.append(form);
        frame.onload = () => {
          let shown = "";
          try { shown = frame.contentDocument ? frame.contentDocument.body.innerHTML : ""; }
          catch { /* of another origin */ }
          resolve("sent " + shown);
        };
        form.submit();
      })));
  return seen;
}"""
