// The package's types grow from the public contract: this file compiles only while they are assignable to it.

import assert from "node:assert/strict";
import { test } from "node:test";
import * as qandle from "../src/index.js";
import type * as contract from "./contract.js";

// What the package gives is what the contract promises: functions, engine, replies, events.
qandle satisfies typeof contract;

type Gives<Ours extends Promised, Promised> = [Ours, Promised];
export type Given = [
  Gives<qandle.Engine, contract.Engine>,
  Gives<qandle.EngineInfo, contract.EngineInfo>,
  Gives<qandle.Progress, contract.Progress>,
  Gives<qandle.Notice, contract.Notice>,
  Gives<qandle.ChatReply, contract.ChatReply>,
  Gives<qandle.ChatChunk, contract.ChatChunk>,
  Gives<qandle.Metrics, contract.Metrics>,
  Gives<qandle.Profile, contract.Profile>,
  Gives<qandle.Estimate, contract.Estimate>,
  Gives<qandle.StoredModel, contract.StoredModel>,
  Gives<qandle.SessionInfo, contract.SessionInfo>,
  Gives<qandle.ErrorCode, contract.ErrorCode>,
  Gives<qandle.QandleError, contract.QandleError>,
];

// What the contract lets a caller pass is what the package takes.
export type Taken = [
  Gives<contract.ModelSource, qandle.ModelSource>,
  Gives<contract.LoadOptions, qandle.LoadOptions>,
  Gives<contract.ChatRequest, qandle.ChatRequest>,
  Gives<contract.CompletionRequest, qandle.CompletionRequest>,
  Gives<contract.ChatMessage, qandle.ChatMessage>,
  Gives<contract.ErrorCode, qandle.ErrorCode>,
];

test("the_list_of_exports_is_the_contracts", () => {
  assert.deepEqual(Object.keys(qandle).sort(), ["QandleError", "load", "models"]);
});

test("an_error_made_by_hand_has_a_code", () => {
  const error = new qandle.QandleError("m", { code: "numeric", cause: 1, detail: { a: 1 } });
  assert.deepEqual(
    [error.code, error.message, error.cause, error.detail, error.name],
    ["numeric", "m", 1, { a: 1 }, "QandleError"],
  );
  assert.ok(error instanceof Error && new qandle.QandleError("m").code === "invalid_request");
});

test("load_outside_a_browser_refuses_and_does_not_throw_on_import", async () => {
  await assert.rejects(qandle.load("https://h/m.gguf"), { code: "unsupported_browser" });
  await assert.rejects(qandle.models.list(), { code: "unsupported_browser" });
});
