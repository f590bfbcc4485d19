//! Reading and writing the worker's messages, and the few browser functions around them.

use super::ids_of;
use crate::error::{Error, Result};
use crate::store::browser::describe;
use js_sys::{Function, Promise, Reflect, Uint32Array, JSON};
use serde::Serialize;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::OnceLock;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{MessageChannel, MessagePort};

/// One request of the client.
pub struct Request {
    /// Chosen by the client.
    pub id: u32,
    /// What is wanted.
    pub method: String,
    params: JsValue,
}

impl Request {
    /// Reads an envelope; `None` when it is none.
    pub fn read(message: &JsValue) -> Option<Self> {
        Some(Self {
            id: id(message)?,
            method: text(message, "method")?,
            params: Reflect::get(message, &"params".into()).ok()?,
        })
    }

    /// A member of the parameters.
    pub fn param(&self, key: &str) -> JsValue {
        Reflect::get(&self.params, &key.into()).unwrap_or(JsValue::UNDEFINED)
    }

    /// The parameters as JSON. By way of JSON text: its parser bounds the depth, and lone surrogates become U+FFFD.
    pub fn json(&self) -> Result<Value> {
        let refuse = |why: String| Error::invalid_request(format!("the request is no JSON: {why}"));
        let finite =
            Closure::<dyn Fn(JsValue, JsValue) -> std::result::Result<JsValue, JsValue>>::new(finite);
        let text =
            JSON::stringify_with_replacer(&self.params, finite.as_ref()).map_err(|e| refuse(describe(&e)))?;
        // Of nothing (or a function) it makes undefined.
        let text = JsValue::from(text).as_string().ok_or_else(|| refuse("there are no parameters".into()))?;
        serde_json::from_str(&well_formed(text)).map_err(|e| refuse(e.to_string()))
    }

    /// Token ids from an array or a `Uint32Array`.
    pub fn ids(&self, key: &str) -> Result<Vec<u32>> {
        match typed(&self.param(key)) {
            Some(ids) => Ok(ids),
            None => ids_of(&self.json()?[key]),
        }
    }

    /// A completion's prompt, where it is a typed array of ids.
    pub fn prompt_ids(&self) -> Option<Vec<u32>> {
        typed(&Reflect::get(&self.param("body"), &"prompt".into()).ok()?)
    }
}

/// A replacer that refuses NaN and infinities, which JSON would turn into null, and leaves out typed arrays, which it
/// would turn into objects with a member for each number: they are read by [`typed`].
fn finite(key: JsValue, value: JsValue) -> std::result::Result<JsValue, JsValue> {
    if value.dyn_ref::<Uint32Array>().is_some() {
        return Ok(JsValue::UNDEFINED);
    }
    match value.as_f64() {
        Some(number) if !number.is_finite() => {
            let key = key.as_string().unwrap_or_default();
            Err(js_sys::Error::new(&format!("{key} is {number}")).into())
        }
        _ => Ok(value),
    }
}

fn typed(value: &JsValue) -> Option<Vec<u32>> {
    value.dyn_ref::<Uint32Array>().map(Uint32Array::to_vec)
}

/// `JSON.stringify` writes a lone surrogate as an escape; serde_json refuses those.
fn well_formed(json: String) -> String {
    if !json.contains("\\ud") && !json.contains("\\uD") {
        return json;
    }
    let mut out = String::with_capacity(json.len());
    let mut rest = json.as_str();
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let surrogate = rest[at..].get(..6).is_some_and(|e| {
            let e = e.as_bytes();
            e[1] == b'u'
                && matches!(e[2], b'd' | b'D')
                && matches!(e[3], b'8'..=b'9' | b'a'..=b'f' | b'A'..=b'F')
        });
        let len = if surrogate { 6 } else { 2 };
        out.push_str(if surrogate { "\\ufffd" } else { &rest[at..at + len] });
        rest = &rest[at + len..];
    }
    out + rest
}

/// The `id` of a message.
pub fn id(message: &JsValue) -> Option<u32> {
    Reflect::get(message, &"id".into()).ok()?.as_f64().map(|id| id as u32)
}

/// A text member of a message.
pub fn text(message: &JsValue, key: &str) -> Option<String> {
    Reflect::get(message, &key.into()).ok()?.as_string()
}

/// Plain objects, arrays, numbers and null.
pub fn to_js(value: &impl Serialize) -> JsValue {
    // Numbers, strings, arrays and string-keyed maps always convert.
    value.serialize(&serde_wasm_bindgen::Serializer::json_compatible()).unwrap_or(JsValue::NULL)
}

/// Size of the wasm memory.
pub fn wasm_bytes() -> u64 {
    core::arch::wasm32::memory_size(0) as u64 * 65536
}

/// Bytes of the device's memory, roughly, where the browser tells.
pub fn device_bytes() -> Option<u64> {
    let navigator = Reflect::get(&js_sys::global(), &"navigator".into()).ok()?;
    let gigabytes = Reflect::get(&navigator, &"deviceMemory".into()).ok()?.as_f64()?;
    (gigabytes > 0.0).then_some((gigabytes * f64::from(1 << 30)) as u64)
}

/// A seed for requests that bring none.
pub fn random_u64() -> u64 {
    let half = || (js_sys::Math::random() * 4294967296.0) as u64;
    half() << 32 | half()
}

/// Lets the event loop turn once, so that waiting messages are handled. A message channel costs some µs where a timer
/// would be held back by milliseconds.
pub struct EventLoop {
    port: MessagePort,
    waiting: Rc<RefCell<VecDeque<Function>>>,
    _on_message: Closure<dyn FnMut()>,
}

impl EventLoop {
    /// Opens the channel.
    pub fn new() -> std::result::Result<Self, JsValue> {
        let channel = MessageChannel::new()?;
        let waiting = Rc::new(RefCell::new(VecDeque::<Function>::new()));
        let resolve = waiting.clone();
        let on_message = Closure::new(move || {
            let next = resolve.borrow_mut().pop_front();
            if let Some(next) = next {
                // A promise's resolver does not throw.
                let _ = next.call0(&JsValue::NULL);
            }
        });
        channel.port1().set_onmessage(Some(on_message.as_ref().unchecked_ref()));
        Ok(Self { port: channel.port2(), waiting, _on_message: on_message })
    }

    /// Comes back after the messages that waited.
    pub async fn turn(&self) {
        let promise = Promise::new(&mut |resolve, _| {
            self.waiting.borrow_mut().push_back(resolve);
            if self.port.post_message(&JsValue::NULL).is_err() {
                let resolve = self.waiting.borrow_mut().pop_back();
                if let Some(resolve) = resolve {
                    // As above.
                    let _ = resolve.call0(&JsValue::NULL);
                }
            }
        });
        // It is never rejected.
        let _ = JsFuture::from(promise).await;
    }
}

static DEATH_CHANNEL: OnceLock<String> = OnceLock::new();

/// Prints panics to the console and, with a channel's name, says on it that the engine is dead: a panic on a pool
/// thread leaves the engine's own thread waiting, unable to say anything.
pub fn announce_panics(channel: Option<String>) {
    if let Some(name) = channel {
        // A second engine in one worker does not exist; the first name stays.
        let _ = DEATH_CHANNEL.set(name);
    }
    std::panic::set_hook(Box::new(|info| {
        let message = info.to_string();
        web_sys::console::error_1(&message.as_str().into());
        if let Some(channel) = DEATH_CHANNEL.get().and_then(|name| web_sys::BroadcastChannel::new(name).ok())
        {
            let fatal = to_js(&serde_json::json!({ "type": "fatal", "message": message }));
            // Nobody is left to be told of a failure here; the page's lock still ends the wait.
            let _ = channel.post_message(&fatal);
        }
    }));
}
