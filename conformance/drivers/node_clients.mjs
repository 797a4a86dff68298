// The vendors' clients for Node: each case is one JSON line, {"case": name, "error": what went wrong or ""}.
// Arguments: url and model of the embedded model, url and model of the scripted one.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, model, scriptedUrl, scripted] = process.argv.slice(2);
const settings = { apiKey: "none", timeout: 90_000, maxRetries: 0 };
const gpt = new OpenAI({ ...settings, baseURL: `${url}/v1` });
const claude = new Anthropic({ ...settings, baseURL: url });
const leadGpt = new OpenAI({ ...settings, baseURL: `${scriptedUrl}/v1` });
const leadClaude = new Anthropic({ ...settings, baseURL: scriptedUrl });

const messages = [{ role: "user", content: "What is the capital of France?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { name: "weather", description: "weather of a city", parameters: schema };
const HEARD = "The tool was heard.";

async function tried(name, body) {
  let error = "";
  try {
    await body();
  } catch (problem) {
    error = `${problem.name}: ${problem.message}`;
  }
  console.log(JSON.stringify({ case: name, error }));
}

await tried("openai: models are listed", async () => {
  const names = [];
  for await (const each of gpt.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
});

await tried("openai: a chat streams what it answers", async () => {
  const asked = { model, messages, temperature: 0, max_tokens: 30 };
  const plain = await gpt.chat.completions.create(asked);
  const stream = await gpt.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, plain.choices[0].message.content);
  assert.match(text, /Paris/);
  assert.equal(usage.completion_tokens, plain.usage.completion_tokens);
  assert.ok(usage.prompt_tokens_details.cached_tokens > 0, "asked again, nothing was cached");
});

await tried("openai: its runner calls the tool and goes on", async () => {
  const heard = [];
  const tool = { type: "function", function: { ...weather, parse: JSON.parse, function: (given) => { heard.push(given); return "cold"; } } };
  const runner = leadGpt.chat.completions.runTools({ model: scripted, messages, tools: [tool], stream: true });
  assert.equal(await runner.finalContent(), HEARD);
  assert.deepEqual(heard, [{ city: "Oslo" }]);
});

await tried("openai: an answer keeps to its schema", async () => {
  const format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
  const asked = [{ role: "user", content: "Name a city." }];
  const answer = await gpt.chat.completions.parse({ model, messages: asked, response_format: format, max_tokens: 60 });
  assert.ok(schema.properties.city.enum.includes(JSON.parse(answer.choices[0].message.content).city));
});

await tried("openai: responses stream what they answer", async () => {
  const asked = { model, input: messages[0].content, temperature: 0, max_output_tokens: 40 };
  const plain = await gpt.responses.create(asked);
  const stream = gpt.responses.stream(asked);
  let text = "";
  stream.on("response.output_text.delta", (event) => { text += event.delta; });
  const final = await stream.finalResponse();
  assert.equal(text, plain.output_text);
  assert.equal(final.output_text, plain.output_text);
  assert.match(text, /Paris/);
});

await tried("openai: a response calls a tool and goes on", async () => {
  const tools = [{ type: "function", strict: true, ...weather }];
  const first = await leadGpt.responses.create({ model: scripted, input: messages, tools });
  const call = first.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo" });
  const result = { type: "function_call_output", call_id: call.call_id, output: "cold" };
  const second = await leadGpt.responses.create({ model: scripted, input: [...messages, ...first.output, result], tools });
  assert.equal(second.output_text, HEARD);
});

await tried("openai: errors are its own", async () => {
  await assert.rejects(gpt.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
  await assert.rejects(gpt.completions.create({ model, prompt: "x", max_tokens: -1 }), OpenAI.BadRequestError);
});

await tried("openai: a stream that is left is cancelled", async () => {
  const stream = await gpt.chat.completions.create({ model, messages, max_tokens: 1000, stream: true });
  for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
  for (let tries = 0; tries < 100; tries += 1) {
    const text = await (await fetch(`${url}/metrics`)).text();
    const running = [...text.matchAll(/^rackserve_requests_running\{.*\} (\S+)$/gm)].reduce((sum, found) => sum + Number(found[1]), 0);
    if (running === 0) return;
    await new Promise((resolve) => { setTimeout(resolve, 100); });
  }
  assert.fail("ten seconds later it still runs");
});

await tried("anthropic: messages stream what they answer", async () => {
  const asked = { model, messages, max_tokens: 30, temperature: 0 };
  const plain = await claude.messages.create(asked);
  const stream = claude.messages.stream(asked);
  let text = "";
  stream.on("text", (delta) => { text += delta; });
  const final = await stream.finalMessage();
  assert.equal(text, plain.content[0].text);
  assert.equal(final.content[0].text, text);
  assert.match(text, /Paris/);
  assert.ok(final.usage.cache_read_input_tokens > 0, "asked again, nothing was cached");
});

await tried("anthropic: tokens are counted as they are used", async () => {
  const counted = await claude.messages.countTokens({ model, messages });
  const { usage } = await claude.messages.create({ model, messages, max_tokens: 1 });
  assert.equal(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
});

await tried("anthropic: a message calls a tool and goes on", async () => {
  const tools = [{ name: "weather", description: weather.description, input_schema: schema }];
  const first = await leadClaude.messages.stream({ model: scripted, messages, max_tokens: 100, tools }).finalMessage();
  assert.equal(first.stop_reason, "tool_use");
  const call = first.content.find((block) => block.type === "tool_use");
  assert.deepEqual(call.input, { city: "Oslo" });
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "cold" }] };
  const history = [...messages, { role: "assistant", content: first.content }, result];
  const second = await leadClaude.messages.create({ model: scripted, messages: history, max_tokens: 100, tools });
  assert.equal(second.content[0].text, HEARD);
});

await tried("anthropic: errors are its own", async () => {
  await assert.rejects(claude.messages.create({ model: "other", messages, max_tokens: 5 }), Anthropic.NotFoundError);
  await assert.rejects(claude.messages.create({ model, messages, max_tokens: -5 }), Anthropic.BadRequestError);
});
