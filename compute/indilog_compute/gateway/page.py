"""`/docs`: an interactive page that shows the OpenAPI description, and the security headers of the
gateway's pages. The pages load nothing from other servers. `app`, `guard` and `login` send them.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from typing import Final

HTML: Final = (b"content-type", b"text/html; charset=utf-8")
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def page_headers(page: str) -> tuple[tuple[bytes, bytes], ...]:
    """Return the security headers of `page`. With these headers, browsers run only the page's own
    script, load nothing from other servers, and do not show the page in a frame.
    """
    allowed = {"script": "script-src", "style": "style-src"}
    rules = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    rules.append("frame-ancestors 'none'")
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rules.append(f"{allowed[kind]} 'sha256-{digest}'")
    return (
        (b"content-security-policy", "; ".join(rules).encode()),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cache-control", b"no-store"),
    )


PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>IndiLog</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
    color: #1c2430; background: #fff }
  h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
  details { border: 1px solid #d4dae3; border-radius: 6px; margin: .4rem 0; padding: .4rem .8rem }
  summary { cursor: pointer } code, pre, textarea, input { font: 13px/1.4 ui-monospace, monospace }
  .method { display: inline-block; min-width: 3.6rem; font-weight: 600; color: #0b5cad }
  .about { color: #5a6675; margin-left: .6rem }
  pre { background: #f4f6f9; padding: .6rem; overflow: auto; max-height: 20rem }
  textarea { width: 100%; min-height: 5rem; box-sizing: border-box } input { width: 14rem }
  label { display: inline-block; margin: .2rem 1rem .2rem 0 } button { margin: .4rem 0 }
  @media (prefers-color-scheme: dark) {
    body { color: #dfe5ee; background: #14181f } pre { background: #1d232d }
    details { border-color: #333d4b } .about { color: #93a0b1 } .method { color: #6db3ff }
  }
</style>
<h1>IndiLog</h1>
<p>Deployed functions and the platform's routes. The description itself:
<a href="openapi.json">openapi.json</a>.</p>
<div id="routes">Loading.</div>
<script>
"use strict";
const make = (tag, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
};
const example = (schema, document_, depth) => {
  if (!schema || depth > 6) return null;
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return example(document_.components.schemas[name], document_, depth + 1);
  }
  if (schema.default !== undefined) return schema.default;
  if (schema.enum) return schema.enum[0];
  const first = (schema.anyOf || schema.allOf || schema.oneOf || [])[0];
  if (first) return example(first, document_, depth + 1);
  if (schema.type === "object" || schema.properties) {
    const value = {};
    const required = schema.required || [];
    for (const [name, inner] of Object.entries(schema.properties || {}))
      if (required.includes(name)) value[name] = example(inner, document_, depth + 1);
    return value;
  }
  return { string: "", integer: 0, number: 0, boolean: false, array: [] }[schema.type] ?? null;
};
const tryForm = (path, method, operation, document_) => {
  const form = make("form");
  const fields = [];
  for (const parameter of operation.parameters || []) {
    if (parameter.in === "header") continue;
    const label = make("label", parameter.name + " ");
    const input = make("input");
    input.placeholder = parameter.required ? "required" : "";
    input.title = parameter.description || "";
    label.append(input);
    form.append(label);
    fields.push([parameter, input]);
  }
  const content = (operation.requestBody || {}).content || {};
  let body = null;
  if (content["application/json"]) {
    body = make("textarea");
    body.value = JSON.stringify(example(content["application/json"].schema, document_, 0), null, 2);
    form.append(body);
  }
  const button = make("button", "Send");
  const answer = make("pre");
  answer.hidden = true;
  form.append(make("br"), button, answer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let target = path;
    const query = new URLSearchParams();
    for (const [parameter, input] of fields) {
      if (parameter.in === "path")
        target = target.replace("{" + parameter.name + "}", encodeURIComponent(input.value));
      else if (input.value !== "") query.append(parameter.name, input.value);
    }
    if ([...query].length) target += "?" + query;
    const options = { method: method.toUpperCase() };
    if (body) {
      options.body = body.value;
      options.headers = { "content-type": "application/json" };
    }
    answer.hidden = false;
    try {
      const response = await fetch(target.slice(1), options);
      const text = await response.text();
      let shown = text;
      try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON */ }
      answer.textContent = response.status + " " + response.statusText + "\\n" + shown;
    } catch (error) { answer.textContent = String(error); }
  });
  return form;
};
const shown = (document_) => {
  const groups = new Map();
  for (const [path, methods] of Object.entries(document_.paths))
    for (const [method, operation] of Object.entries(methods)) {
      const group = (operation.tags || ["other"])[0];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push([path, method, operation]);
    }
  const names = [...groups.keys()].sort(
    (a, b) => b.startsWith("app ") - a.startsWith("app ") || a.localeCompare(b));
  const root = document.getElementById("routes");
  root.textContent = "";
  for (const name of names) {
    root.append(make("h2", name));
    for (const [path, method, operation] of groups.get(name)) {
      const box = make("details");
      const head = make("summary");
      head.append(make("span", method.toUpperCase(), "method"), make("code", path),
        make("span", operation.summary || "", "about"));
      box.append(head);
      box.append(make("p", operation.description || ""));
      if (path.endsWith("/stream")) box.append(make("p", "Open it with curl -N; it has no end."));
      else box.append(tryForm(path, method, operation, document_));
      root.append(box);
    }
  }
};
fetch("openapi.json").then((response) => response.json()).then(shown);
</script>
</html>
"""
