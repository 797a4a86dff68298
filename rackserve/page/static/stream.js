// Reads server-sent events from the body of a fetch. Yields the parsed JSON of each; ends at [DONE] or with the body.
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      text += done ? decoder.decode() : decoder.decode(value, { stream: true });
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const lines = text.slice(0, end).split("\n");
        text = text.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// What went wrong, as an error with the server's words and code, or as good as can be.
export async function problem(response) {
  const text = await response.text();
  let told = text.slice(0, 500);
  let code = "";
  try {
    const { error } = JSON.parse(text);
    told = error.message;
    code = error.code;
  } catch {
    // no error body of ours: the text must do
  }
  const again = response.headers.get("retry-after");
  const error = new Error(`${told || response.statusText} (${response.status}${again ? `, try again in ${again} s` : ""})`);
  return Object.assign(error, { code });
}
