// Reads a stream of server-sent events. An item has the data of an event or the text of a comment, and the time of its arrival.

export async function* readEvents(stream, now = () => performance.now()) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const at = now();
      pending += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A carriage return at the end may be the first half of a line end.
      const lines = pending.split(/\r\n|\n|\r(?!$)/);
      pending = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { data: data.join("\n"), at };
          data = [];
        } else if (line.startsWith(":")) {
          yield { comment: line.slice(1).trimStart(), at };
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // a consumer that stops early ends the request
  }
}
