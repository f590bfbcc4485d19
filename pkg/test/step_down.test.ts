import assert from "node:assert/strict";
import { test } from "node:test";
import {
  type Config,
  type History,
  type Kill,
  noticesOf,
  stepDown,
  withAnswer,
  withKill,
} from "../src/step_down.js";

const FREE = { threads: false, contextLength: false };
const FULL = { threads: 4, contextLength: 4096 };
const KILL: Kill = { phase: "load", at: 5, hidden: false, ...FULL };

test("threads_go_first_then_half_of_the_context_at_a_time", () => {
  const steps: [Config, typeof FREE, [number, number][]][] = [
    [
      FULL,
      FREE,
      [
        [4, 4096],
        [1, 4096],
        [1, 2048],
        [1, 1024],
        [1, 1024],
      ],
    ],
    [
      { ...FULL, threads: 1 },
      FREE,
      [
        [1, 4096],
        [1, 2048],
        [1, 1024],
        [1, 1024],
      ],
    ],
    [
      FULL,
      { threads: true, contextLength: false },
      [
        [4, 4096],
        [4, 2048],
        [4, 1024],
      ],
    ],
    [
      { threads: 4, contextLength: 16384 },
      { threads: false, contextLength: true },
      [
        [4, 16384],
        [1, 16384],
        [1, 16384],
      ],
    ],
    [
      FULL,
      { threads: true, contextLength: true },
      [
        [4, 4096],
        [4, 4096],
        [4, 4096],
      ],
    ],
    [
      { threads: 1, contextLength: 1500 },
      FREE,
      [
        [1, 1500],
        [1, 1024],
      ],
    ],
    [
      { threads: 1, contextLength: 64 },
      FREE,
      [
        [1, 64],
        [1, 64],
      ],
    ],
  ];
  for (const [full, fixed, expected] of steps) {
    expected.forEach(([threads, contextLength], n) => {
      assert.deepEqual(stepDown(full, n, fixed), { threads, contextLength }, `${JSON.stringify(full)} ${n}`);
    });
  }
});

test("kills_add_up_and_remember_the_most_that_was_killed", () => {
  let history: History | null = null;
  for (const threads of [1, 4, 1, 1, 1]) history = withKill(history, { ...KILL, threads, at: 10 - threads });
  assert.deepEqual(history, { steps: 3, inARow: 5, threads: 4, contextLength: 4096, phase: "load", at: 9 });
});

test("an_answer_ends_the_row_and_forgets_all_where_nothing_was_lowered", () => {
  const history = withKill(withKill(null, KILL), { ...KILL, threads: 1 });
  const low = withAnswer(history, { threads: 1, contextLength: 4096 });
  assert.deepEqual(low, { ...history, inARow: 0 });
  assert.equal(withAnswer(history, { threads: 4, contextLength: 2048 })?.steps, 2);
  assert.equal(withAnswer(history, FULL), null);
  assert.equal(withAnswer(history, { threads: 8, contextLength: 8192 }), null);
  assert.deepEqual(low && withKill(low, { ...KILL, threads: 1 }), { ...history, steps: 3, inARow: 1 });
});

test("notices_say_what_happened_and_only_what_was_lowered", () => {
  const history = withKill(null, KILL);
  const source = "hf:a/b/c@main";
  const told = (past: Parameters<typeof noticesOf>[0], config: Config) =>
    noticesOf(past, { source, full: FULL, config });
  const [killed, stepped, ...more] = told({ history, killed: KILL }, { threads: 1, contextLength: 2048 });
  assert.deepEqual(more, []);
  assert.equal(killed?.code, "tab_was_killed");
  assert.match(killed?.message ?? "", /ended this page while the model was loaded/);
  assert.deepEqual(killed?.detail, { ...KILL, source, inARow: 1 });
  assert.equal(stepped?.code, "stepped_down");
  assert.match(stepped?.message ?? "", /one thread and a context of 2048 tokens/);
  const { threads, contextLength, cause, from } = stepped?.detail ?? {};
  assert.deepEqual([threads, contextLength, cause, from], [1, 2048, "tab_was_killed", FULL]);
  const codes = (...all: Parameters<typeof told>) => told(...all).map(({ code }) => code);
  assert.deepEqual(codes({ history, killed: KILL }, FULL), ["tab_was_killed"]);
  assert.deepEqual(codes({ history, killed: null }, { ...FULL, threads: 1 }), ["stepped_down"]);
  assert.deepEqual(codes({ history: null, killed: null }, FULL), []);
  const phases = ["start", "warmup", "generation"].map(
    (phase) => told({ history: null, killed: { ...KILL, phase, hidden: true } }, FULL)[0]?.message,
  );
  assert.match(phases.join("|"), /background while the engine started.*was loaded.*the model answered/);
});
