// The server's side of the page: the same /v1 endpoints that every client uses, relative to the page, so that it works behind a proxy
// that adds a path.

const url = (path) => new URL(path, document.baseURI);

const headers = (key) => ({ "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) });

// A refusal or an error of the server. Status is 0 for one within a stream.
export class ServerError extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.param = error.param ?? null;
    this.code = error.code ?? null;
  }
}

async function failure(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Something between the page and the server answered.
  }
  return new ServerError(response.status, body);
}

// The served model: {id, max_model_len}.
export async function model(key) {
  const response = await fetch(url("v1/models"), { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data[0];
}

// The chunks of a streamed answer. It throws ServerError for a refusal and for an error event, and if the stream ends early.
export async function* chat(body, key, signal) {
  const response = await fetch(url("v1/chat/completions"), { method: "POST", headers: headers(key), body: JSON.stringify({ ...body, stream: true }), signal });
  if (!response.ok) throw await failure(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(0, chunk);
    yield chunk;
  }
  throw new ServerError(0, { error: { message: "the connection ended before the answer did" } });
}

// The data of server-sent events. Comments and other fields are skipped.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Puts a delta into a message, which grows by it. Calls may come whole or in pieces.
export function grow(message, delta) {
  if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  if (delta.content) message.content = (message.content ?? "") + delta.content;
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= piece.id ?? "";
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
}
