// One answer: asks, reads the stream, and tells what has come so far. Models without a chat template go on with a text instead.
import { events, problem } from "/page/stream.js";

// An answer that came within this time came at once, as far as a page can tell: no speed.
const AT_ONCE_MS = 50;

function body(model, messages, settings, conversation, completing) {
  const request = { model, stream: true, stream_options: { include_usage: true }, prompt_cache_key: conversation };
  if (completing) request.prompt = messages.map(({ content }) => content).join("");
  else request.messages = settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages;
  if (settings.temperature !== "") request.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") request.max_tokens = Number(settings.maxTokens);
  return JSON.stringify(request);
}

function take(answer, choice) {
  const delta = choice.delta ?? { content: choice.text };
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  answer.reasoning += reasoning;
  answer.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { name: "", arguments: "" });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

// The answer, told to `changed` at each step. Resolves when it has ended, however it has: `error` says what went wrong.
export async function talk({ model, messages, settings, conversation, completing, signal, changed }) {
  const answer = { role: "assistant", content: "", reasoning: "", calls: [], state: "waiting", model, error: "", code: "" };
  const begun = performance.now();
  let first = 0;
  let last = 0;
  try {
    const response = await fetch(completing ? "/v1/completions" : "/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: body(model, messages, settings, conversation, completing),
      signal,
    });
    if (response.status === 401) location.reload();
    if (!response.ok) throw await problem(response);
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      answer.model = chunk.model ?? answer.model;
      if (chunk.usage) answer.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (choice?.finish_reason) answer.finish = choice.finish_reason;
      if (choice && take(answer, choice)) {
        last = performance.now();
        first ||= last;
        answer.state = "writing";
        answer.ttft = (first - begun) / 1000;
        changed({ ...answer });
      }
    }
    answer.state = "done";
    const tokens = answer.usage?.completion_tokens ?? 0;
    if (tokens > 1 && last - first > AT_ONCE_MS) answer.speed = ((tokens - 1) * 1000) / (last - first);
  } catch (error) {
    answer.state = signal.aborted ? "stopped" : "failed";
    answer.error = signal.aborted ? "" : error.message;
    answer.code = error.code ?? "";
  }
  changed({ ...answer });
  return answer;
}
