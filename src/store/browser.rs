//! The browser's own functions that the store stands on, as futures with plain results.

use super::manifest::hex;
use js_sys::{Array, Function, Object, Promise, Reflect, Uint8Array};
use sha2::{Digest, Sha256};
use std::future::Future;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::{future_to_promise, JsFuture};
use web_sys::{AbortController, AbortSignal, WorkerGlobalScope};

/// The worker's global scope.
pub fn scope() -> WorkerGlobalScope {
    js_sys::global().unchecked_into()
}

/// A JavaScript error's own words.
pub fn describe(error: &JsValue) -> String {
    match Reflect::get(error, &"message".into()).ok().and_then(|message| message.as_string()) {
        Some(message) if error.is_object() => message,
        _ => error.as_string().unwrap_or_else(|| format!("{error:?}")),
    }
}

/// A JavaScript error's `name`.
pub fn error_name(error: &JsValue) -> String {
    Reflect::get(error, &"name".into()).ok().and_then(|name| name.as_string()).unwrap_or_default()
}

/// Aborts `own` when `signal` fires.
pub fn follow(signal: &AbortSignal, own: &AbortController) {
    if signal.aborted() {
        own.abort();
    }
    let own = own.clone();
    let end = Closure::once_into_js(move || own.abort());
    // A listener that stays until the signal goes costs little; adding it does not throw.
    let _ = signal.add_event_listener_with_callback("abort", end.unchecked_ref());
}

/// Comes back after `ms`, or at once when `signal` fires.
pub async fn sleep(ms: i32, signal: Option<&AbortSignal>) {
    let promise = Promise::new(&mut |resolve, _| {
        if let Some(signal) = signal {
            if signal.aborted() {
                let _ = resolve.call0(&JsValue::NULL);
                return;
            }
            // A listener that stays until the signal goes costs nothing.
            let _ = signal.add_event_listener_with_callback("abort", &resolve);
        }
        // A worker's timers do not throw.
        let _ = scope().set_timeout_with_callback_and_timeout_and_arguments_0(&resolve, ms);
    });
    let _ = JsFuture::from(promise).await;
}

/// What `work` comes to, or an error after `ms`.
pub async fn within<T>(
    ms: i32,
    work: impl Future<Output = Result<T, JsValue>>,
    otherwise: &str,
) -> Result<T, JsValue> {
    // Polled by hand: the work borrows, so it cannot be given to the event loop.
    let late = future_to_promise(async move {
        sleep(ms, None).await;
        Ok(JsValue::UNDEFINED)
    });
    let late = JsFuture::from(late);
    let (mut work, mut late) = (Box::pin(work), Box::pin(late));
    std::future::poll_fn(|context| {
        if let std::task::Poll::Ready(result) = work.as_mut().poll(context) {
            return std::task::Poll::Ready(result);
        }
        late.as_mut().poll(context).map(|_| Err(otherwise.into()))
    })
    .await
}

/// SHA-256 in hex: by WebCrypto, on a thread of the browser; by ourselves where the page is not secure.
pub async fn sha256(bytes: &Uint8Array) -> String {
    let crypto = Reflect::get(&js_sys::global(), &"crypto".into()).ok();
    let subtle = crypto.and_then(|crypto| Reflect::get(&crypto, &"subtle".into()).ok());
    if let Some(subtle) = subtle.filter(|subtle| subtle.is_object()) {
        let digest = Reflect::get(&subtle, &"digest".into()).and_then(|digest| digest.dyn_into::<Function>());
        let promise = digest.and_then(|digest| digest.call2(&subtle, &"SHA-256".into(), bytes));
        if let Ok(Ok(promise)) = promise.map(|promise| promise.dyn_into::<Promise>()) {
            if let Ok(hash) = JsFuture::from(promise).await {
                return hex(&Uint8Array::new(&hash).to_vec());
            }
        }
    }
    let mut hash = Sha256::new();
    each_piece(bytes, |piece| hash.update(piece));
    hex(&hash.finalize())
}

/// Bytes that cross into wasm at a time.
const PIECE: u32 = 256 << 10;

/// Hands bytes into wasm, a piece after the other.
pub fn each_piece(bytes: &Uint8Array, mut take: impl FnMut(&[u8])) {
    let mut piece = vec![0; PIECE.min(bytes.length()) as usize];
    let mut at = 0;
    while at < bytes.length() {
        let n = PIECE.min(bytes.length() - at);
        bytes.subarray(at, at + n).copy_to(&mut piece[..n as usize]);
        take(&piece[..n as usize]);
        at += n;
    }
}

/// Bytes that the origin uses, and that it may use; `None` where the browser does not tell.
pub async fn storage_estimate() -> Option<(f64, f64)> {
    let storage = Reflect::get(&scope().navigator(), &"storage".into()).ok()?;
    let estimate = Reflect::get(&storage, &"estimate".into()).ok()?.dyn_into::<Function>().ok()?;
    let promise = estimate.call0(&storage).ok()?.dyn_into::<Promise>().ok()?;
    let found = JsFuture::from(promise).await.ok()?;
    let number = |key: &str| Reflect::get(&found, &key.into()).ok().and_then(|number| number.as_f64());
    Some((number("usage")?, number("quota")?))
}

/// A Web Lock; it is free again when this is dropped.
#[derive(Debug)]
pub struct Lock(Option<Function>);

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some(release) = self.0.take() {
            // A promise's resolver does not throw.
            let _ = release.call0(&JsValue::NULL);
        }
    }
}

/// Waits for the lock. Where there are none, or `signal` fires, nothing is held.
pub async fn lock(name: &str, signal: &AbortSignal) -> Lock {
    let Ok(locks) = Reflect::get(&scope().navigator(), &"locks".into()) else { return Lock(None) };
    let Ok(request) = Reflect::get(&locks, &"request".into()).and_then(|f| f.dyn_into::<Function>()) else {
        return Lock(None);
    };
    let mut release = None;
    let held = Promise::new(&mut |resolve, _| release = Some(resolve));
    let mut granted = None;
    let waiting = Promise::new(&mut |resolve, _| granted = Some(resolve));
    let (Some(release), Some(granted)) = (release, granted) else { return Lock(None) };
    let on_grant = Closure::once_into_js({
        let granted = granted.clone();
        move |_: JsValue| -> Promise {
            // As above.
            let _ = granted.call0(&JsValue::NULL);
            held
        }
    });
    let options = Object::new();
    // Setting a member of a plain object cannot fail.
    let _ = Reflect::set(&options, &"signal".into(), signal);
    let arguments = Array::of3(&name.into(), &options, &on_grant);
    let asked = Reflect::apply(&request, &locks, &arguments).and_then(|asked| asked.dyn_into::<Promise>());
    let Ok(asked) = asked else { return Lock(None) };
    wasm_bindgen_futures::spawn_local(async move {
        // It is rejected where the signal fired first.
        if JsFuture::from(asked).await.is_err() {
            let _ = granted.call0(&JsValue::NULL);
        }
    });
    let _ = JsFuture::from(waiting).await;
    Lock(Some(release))
}

/// Bytes of a random name, in hex.
pub fn random_name() -> String {
    let word = || (js_sys::Math::random() * 4294967296.0) as u32;
    format!("{:08x}{:08x}", word(), word())
}
