//! The `models.*` requests: what is kept, and what a model would take. They need no loaded model.

use super::beginning::Beginning;
use super::files::Files;
use super::wire::{self, Request};
use super::Inner;
use crate::engine::{now_ms, Engine, Options, SCRATCH_BYTES};
use crate::error::{Error, Result};
use crate::gguf::Metadata;
use crate::store::browser::{each_piece, lock, sha256, storage_estimate};
use crate::store::manifest::{chunk_range, Manifest};
use crate::store::reader::AT_ONCE;
use crate::store::remote::{Remote, Told};
use crate::store::source::{slice, Place, Source};
use crate::store::{tokens, Refusal, Store};
use crate::weights::{Loader, Plan};
use serde_json::{json, Value};
use std::future::Future;
use std::rc::Rc;
use wasm_bindgen::JsValue;
use web_sys::{AbortController, Blob};

/// What wasm memory holds, less what an engine needs beside weights and KV.
const MEMORY: u64 = (4096 - 64) << 20;

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Error::out_of_memory(format!("the browser's storage failed: {}", refusal.message))
    }
}

/// Answers one of them.
pub(super) async fn answer(request: &Request, abort: &AbortController) -> Result<JsValue> {
    let params = request.json()?;
    let key = || match Source::from_js(&request.param("source"))? {
        Source::Url(place) => Ok(place.key),
        Source::Blob(_) => Err(Error::invalid_request("a file is not kept: only what came from a URL is")),
    };
    let value = match request.method.as_str() {
        "models.list" => {
            let rows = match Store::open(None).await {
                Ok(store) => store.manifests().await?,
                Err(_) => Vec::new(),
            };
            rows.iter().map(stored_model).collect()
        }
        "models.has" => {
            let key = key()?;
            let row = match Store::open(None).await {
                Ok(store) => store.manifest(&key).await?,
                Err(_) => None,
            };
            row.is_some_and(|row| row.is_complete()).into()
        }
        "models.delete" => {
            let key = key()?;
            if let Ok(store) = Store::open(None).await {
                if let Some(row) = store.manifest(&key).await? {
                    store.delete(&row).await?;
                }
                store.sweep().await;
                forget_with_last(&store).await?;
            }
            Value::Null
        }
        "models.storage" => match storage_estimate().await {
            Some((used, quota)) => json!({ "usedBytes": used, "quotaBytes": quota, "persisted": false }),
            None => json!({ "usedBytes": 0, "quotaBytes": 0, "persisted": false }),
        },
        "models.verify" => {
            let key = key()?;
            let store = Store::open(None).await?;
            let row = store.manifest(&key).await?;
            let row = row.ok_or_else(|| Error::invalid_request(format!("{key} is not kept")))?;
            let found = verify(&store, &row, abort, || std::future::ready(())).await?;
            json!({ "chunks": found.chunks, "bad": found.bad, "repaired": found.repaired })
        }
        "models.makeRoom" => make_room(params["bytes"].as_f64().unwrap_or(0.0)).await?.into(),
        "models.import" => {
            let blob = match Source::from_js(&request.param("file"))? {
                Source::Blob(blob) => blob,
                Source::Url(_) => return Err(Error::invalid_request("only a file of the page is imported")),
            };
            match Source::from_js(&request.param("source"))? {
                Source::Url(place) => import(&blob, &place, abort).await?,
                Source::Blob(_) => {
                    return Err(Error::invalid_request("a file is kept under a URL or a hub's name"))
                }
            }
            Value::Null
        }
        "models.estimate" => estimate(&Files::from_js(&request.param("source"))?, &params, abort).await?,
        other => return Err(Error::invalid_request(format!("{other} is not available in this version"))),
    };
    Ok(wire::to_js(&value))
}

fn stored_model(row: &Manifest) -> Value {
    json!({
        "source": row.source,
        "name": row.name,
        "bytes": row.bytes,
        "storedBytes": row.stored_bytes(),
        "complete": row.is_complete(),
        "imageBytes": row.image.as_ref().map_or(0, |image| image.bytes),
        "usedAt": row.used_at,
    })
}

/// What became of the chunks that are kept.
pub(super) struct Verified {
    pub chunks: usize,
    pub bad: usize,
    pub repaired: usize,
}

/// Hashes every chunk; a bad one is asked for again, and only if it is then right takes the other's place.
/// Before each chunk it waits for `turn`.
pub(super) async fn verify<F: Future<Output = ()>>(
    store: &Store,
    row: &Manifest,
    abort: &AbortController,
    turn: impl Fn() -> F,
) -> Result<Verified> {
    let remote = Remote::new(&row.url, AT_ONCE, &abort.signal())?;
    remote.expect(Told::of(row, &row.url));
    let mut found = Verified { chunks: 0, bad: 0, repaired: 0 };
    for (i, hash) in row.chunks.iter().enumerate() {
        let Some(hash) = hash else { continue };
        turn().await;
        found.chunks += 1;
        let sound = match store.chunk(row, i, None).await {
            Ok(Some(bytes)) => sha256(&bytes).await == *hash,
            // A file that is being written, by a download of another tab, cannot be read at times.
            Err(_) if !row.is_complete() => continue,
            Ok(None) | Err(_) => false,
        };
        if abort.signal().aborted() {
            return Err(Error::aborted("the verification was cancelled"));
        }
        if sound {
            continue;
        }
        let now = store.manifest(&row.source).await?;
        if now.is_none_or(|now| now.generation != row.generation) {
            return Err(Error::integrity("the model was deleted or replaced while it was verified"));
        }
        found.bad += 1;
        if let Ok(bytes) = remote.range(chunk_range(i, row.bytes)).await {
            if sha256(&bytes).await == *hash && store.put_chunk(row, i, &bytes).await.is_ok() {
                store.modify(&row.source, &row.generation, |row| row.repairs += 1).await?;
                found.repaired += 1;
            }
        }
    }
    Ok(found)
}

/// Deletes models, least recently used first, until the origin may store so many bytes more.
async fn make_room(bytes: f64) -> Result<Vec<String>> {
    let store = Store::open(None).await?;
    store.sweep().await;
    let mut rows = store.manifests().await?;
    rows.sort_by(|a, b| a.used_at.total_cmp(&b.used_at));
    let mut gone = Vec::new();
    for row in rows {
        match storage_estimate().await {
            Some((used, quota)) if quota - used < bytes => {}
            _ => break,
        }
        store.delete(&row).await?;
        gone.push(row.source);
    }
    forget_with_last(&store).await?;
    Ok(gone)
}

/// With the last model goes what was asked of any.
async fn forget_with_last(store: &Store) -> Result<()> {
    if store.manifests().await?.is_empty() {
        tokens::clear().await?;
        store.clear_sessions().await?;
    }
    Ok(())
}

/// Keeps a file of the page as if it had been downloaded from a place.
async fn import(blob: &Blob, place: &Place, abort: &AbortController) -> Result<()> {
    let (plan, name, bytes) = header_of(&Source::Blob(blob.clone()), abort).await?;
    if plan.end > bytes {
        return Err(Error::bad_model(format!("the file has {bytes} bytes, its tensors end at {}", plan.end)));
    }
    let store = Store::open(None).await?;
    let _lock = lock(&format!("qandle-model:{}", place.key), &abort.signal()).await;
    if let Some(old) = store.manifest(&place.key).await? {
        store.delete(&old).await?;
    }
    let mut row = store.new_manifest(place, bytes).await?;
    row.name = name.unwrap_or_default();
    row.packed_bytes = plan.packed_bytes;
    row.used_at = now_ms();
    store.put_manifest(&row).await?;
    let kept = import_chunks(&store, &mut row, blob, abort).await;
    if kept.is_err() {
        // A file that is here anyway need not be taken up again: nothing of it stays.
        store.delete(&row).await?;
    }
    kept
}

async fn import_chunks(
    store: &Store,
    row: &mut Manifest,
    blob: &Blob,
    abort: &AbortController,
) -> Result<()> {
    for i in 0..row.chunks.len() {
        let range = chunk_range(i, row.bytes);
        let chunk = slice(blob, range).await?;
        row.chunks[i] = Some(sha256(&chunk).await);
        store.put_chunk(row, i, &chunk).await?;
        if abort.signal().aborted() {
            return Err(Error::aborted("the import was cancelled"));
        }
    }
    let whole = row.clone();
    match store.modify(&row.source, &row.generation, move |row| *row = whole).await? {
        true => Ok(()),
        false => Err(Error::integrity("the model was deleted while it was imported")),
    }
}

/// Reads the headers alone.
async fn estimate(files: &Files, params: &Value, abort: &AbortController) -> Result<Value> {
    let (plan, name, bytes) = match files {
        Files::One(file) => header_of(file, abort).await?,
        several => {
            let store = Store::open(None).await.ok();
            let (mut loader, ..) = several.plan(store.as_ref(), abort).await?;
            let name = loader.metadata().and_then(model_name);
            let plan = loader.plan().cloned().ok_or_else(|| Error::bad_model("there is no plan"))?;
            let end = plan.end;
            (plan, name, end)
        }
    };
    let wanted = params["contextLength"].as_u64().map(|n| n as usize);
    let most = plan.config.max_position_embeddings;
    let context = wanted.unwrap_or(4096).min(most);
    let options = |context| Options { context_length: Some(context), ..Options::default() };
    let peak = |context| Engine::planned_bytes(&plan, &options(context));
    let needed = peak(context)?;
    let free = storage_estimate().await.map(|(used, quota)| (quota - used).max(0.0));
    let mut out = json!({
        "name": name.unwrap_or_else(|| files.stem()),
        "parameters": plan.parameters(),
        "quantization": plan.quantization,
        "downloadBytes": bytes,
        "peakBytes": needed,
        "contextLength": context,
        "fits": needed <= MEMORY,
        "diskFreeBytes": free,
    });
    if needed > MEMORY {
        out["reason"] = format!("it needs {needed} bytes of memory, and {MEMORY} can be had").into();
        if let Some(fits) = context_that_fits(&plan, &options(context)) {
            out["proposal"] = json!({ "contextLength": fits });
        }
    }
    Ok(out)
}

/// Plan, name and bytes of one GGUF file.
async fn header_of(file: &Source, abort: &AbortController) -> Result<(Plan, Option<String>, u64)> {
    let (mut beginning, bytes) = Beginning::open(file, abort).await?;
    let mut loader = Loader::new(bytes);
    let mut failed = None;
    while let (None, None) = (loader.plan(), &failed) {
        let Some(chunk) = beginning.next().await? else { break };
        each_piece(&chunk, |piece| {
            if failed.is_none() && loader.plan().is_none() {
                failed = loader.push(piece).err();
            }
        });
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let name = loader.metadata().and_then(model_name);
    let Some(plan) = loader.plan().cloned() else {
        return Err(loader.finish().err().unwrap_or_else(|| Error::bad_model("the file ends in its header")));
    };
    let bytes = bytes.unwrap_or(plan.end);
    Ok((plan, name, bytes))
}

fn model_name(metadata: &mut Metadata) -> Option<String> {
    metadata.str("general.name").map(str::to_string)
}

/// The longest context that fits, of those that halving gives.
fn context_that_fits(plan: &Plan, options: &Options) -> Option<usize> {
    let fits = |context: &usize| {
        let options = Options { context_length: Some(*context), ..options.clone() };
        Engine::planned_bytes(plan, &options).is_ok_and(|needed| needed <= most_bytes(&options))
    };
    let context = options.context_length.unwrap_or(4096).min(plan.config.max_position_embeddings);
    (0..).map(|halvings| context >> halvings).take_while(|n| *n >= 512).find(fits)
}

/// What the error of a plan that does not fit carries as its detail.
pub(super) fn too_large(plan: &Plan, options: &Options) -> Result<(Error, Value)> {
    let needed = Engine::planned_bytes(plan, options)?;
    let fits = context_that_fits(plan, options);
    let advice = match fits {
        Some(n) => format!("a contextLength of {n} fits"),
        None => "take a smaller model or quantization".to_string(),
    };
    let most = most_bytes(options);
    let message = format!(
        "weights and the KV cache of the whole context need {needed} bytes, wasm memory holds {most} of them: {advice}"
    );
    let mut detail = json!({ "neededBytes": needed, "limitBytes": most });
    if let Some(n) = fits {
        detail["proposal"] = json!({ "contextLength": n });
    }
    Ok((Error::too_large(message), detail))
}

/// Bytes that weights and one whole context may take.
fn most_bytes(options: &Options) -> u64 {
    options.limits.memory_bytes.map_or(MEMORY, |bytes| MEMORY.min(bytes.saturating_sub(SCRATCH_BYTES)))
}

/// Whether a model fits.
///
/// # Errors
/// `invalid_request` for a context that it was not made for.
pub(super) fn fits(plan: &Plan, options: &Options) -> Result<bool> {
    Ok(Engine::planned_bytes(plan, options)? <= most_bytes(options))
}

impl Inner {
    /// A `models.*` request, beside whatever the engine does.
    pub(super) fn answer_about_models(self: &Rc<Self>, request: Request) {
        let inner = self.clone();
        wasm_bindgen_futures::spawn_local(async move {
            let Ok(abort) = AbortController::new() else { return };
            inner.asides.borrow_mut().insert(request.id, abort.clone());
            let result = answer(&request, &abort).await;
            inner.asides.borrow_mut().remove(&request.id);
            inner.settle(request.id, result);
        });
    }
}
