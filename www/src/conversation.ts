// One conversation with a loaded engine: the history that is sent, and one turn at a time.

import type { ChatMessage, Engine, Extra, FinishReason } from "qandle";
import type { Choices } from "./preferences.js";

/** What a turn tells while it runs. */
export interface TurnEvents {
  onText(text: string): void;
  onThought(text: string): void;
  /** Pieces per second so far; the reply's own timings are exact. */
  onSpeed(tokensPerSecond: number): void;
}

/** How a turn ended. */
export interface TurnEnd {
  finish: FinishReason | null;
  extra: Extra | undefined;
}

/** The messages of a chat, and the session that keeps their KV cache. */
export class Conversation {
  readonly #engine: Engine;
  readonly #session =
    `page-${Array.from(crypto.getRandomValues(new Uint32Array(3)), (n) => n.toString(36)).join("")}`;
  readonly #messages: ChatMessage[] = [];

  constructor(engine: Engine) {
    this.#engine = engine;
  }

  /** Asks and streams the answer. A turn that throws leaves the history as it was. */
  async ask(
    question: string,
    { choices, signal, events }: { choices: Choices; signal: AbortSignal; events: TurnEvents },
  ): Promise<TurnEnd> {
    const user: ChatMessage = { role: "user", content: question };
    const system: ChatMessage[] =
      choices.systemPrompt === "" ? [] : [{ role: "system", content: choices.systemPrompt }];
    const stream = await this.#engine.chat.completions.create(
      {
        messages: [...system, ...this.#messages, user],
        stream: true,
        stream_options: { include_usage: true },
        session_id: this.#session,
        temperature: choices.temperature,
      },
      { signal },
    );
    const end: TurnEnd = { finish: null, extra: undefined };
    let content = "";
    let thoughts = "";
    let pieces = 0;
    let since = 0;
    for await (const { choices: parts, qandle } of stream) {
      const [part] = parts;
      const text = part?.delta.content ?? "";
      const thought = part?.delta.reasoning_content ?? "";
      content += text;
      thoughts += thought;
      if (thought !== "") events.onThought(thought);
      if (text !== "") events.onText(text);
      if (text !== "" || thought !== "") {
        const now = performance.now();
        if (pieces++ === 0) since = now;
        else if (now > since) events.onSpeed(((pieces - 1) * 1000) / (now - since));
      }
      end.finish = part?.finish_reason ?? end.finish;
      end.extra = qandle ?? end.extra;
    }
    if (signal.aborted) end.finish ??= "abort";
    // A turn that was stopped before it said anything is no turn.
    if (content === "" && thoughts === "" && signal.aborted) throw new DOMException("stopped", "AbortError");
    const answer: ChatMessage = { role: "assistant", content };
    if (thoughts !== "") answer.reasoning_content = thoughts;
    this.#messages.push(user, answer);
    return end;
  }
}
