//! A worker beside this one that hashes and stores chunks, where the page can make one. Chromium does both on the thread
//! that asks: a third of a cold load.

use super::browser::within;
use super::db::Refusal;
use js_sys::{ArrayBuffer, Object, Promise, Reflect, Uint8Array};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{MessageChannel, MessageEvent, MessagePort};

/// A chunk that is not stored by then never will be, ms.
const LIMIT_MS: i32 = 60_000;

/// The worker's port.
pub struct Keeper {
    port: MessagePort,
    state: Rc<State>,
    _listener: Closure<dyn FnMut(MessageEvent)>,
}

#[derive(Default)]
struct State {
    listens: Cell<bool>,
    next: Cell<u32>,
    /// Memory of chunks that are stored.
    spare: RefCell<Vec<ArrayBuffer>>,
    waiting: RefCell<HashMap<u32, js_sys::Function>>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.port.set_onmessage(None);
        // The worker ends itself; if it never was there, nothing hears it.
        let _ = self.port.post_message(&JsValue::NULL);
        self.port.close();
    }
}

impl Keeper {
    /// Asks the page for one, by `post`. It is there once it says so.
    ///
    /// # Errors
    /// Where there are no message channels.
    pub fn ask(post: &js_sys::Function) -> Result<Self, JsValue> {
        let channel = MessageChannel::new()?;
        let wanted = object(&[("type", &"keeper".into()), ("port", &channel.port2())]);
        let (port, state) = (channel.port1(), Rc::new(State::default()));
        let heard = state.clone();
        let listener = Closure::<dyn FnMut(MessageEvent)>::new(move |event: MessageEvent| {
            let data = event.data();
            let id = get(&data, "id").as_f64().unwrap_or(-1.0);
            heard.listens.set(true);
            let resolve = heard.waiting.borrow_mut().remove(&(id as u32));
            if let Some(resolve) = resolve {
                // A promise's resolver does not throw.
                let _ = resolve.call1(&JsValue::NULL, &data);
            }
        });
        port.set_onmessage(Some(listener.as_ref().unchecked_ref()));
        post.call1(&JsValue::NULL, &wanted)?;
        Ok(Self { port, state, _listener: listener })
    }

    /// Whether it is there.
    pub fn listens(&self) -> bool {
        self.state.listens.get()
    }

    /// Memory of so many bytes whose chunk is stored, to read another into.
    pub fn spare(&self, bytes: u32) -> Option<ArrayBuffer> {
        let mut spare = self.state.spare.borrow_mut();
        let at = spare.iter().position(|buffer| buffer.byte_length() == bytes)?;
        Some(spare.swap_remove(at))
    }

    /// Takes the bytes away and stores them; gives their SHA-256.
    ///
    /// # Errors
    /// What the browser's storage said.
    pub async fn keep(&self, bucket: &str, url: &str, bytes: &Uint8Array) -> Result<String, Refusal> {
        let id = self.state.next.get() + 1;
        self.state.next.set(id);
        let bytes = bytes.buffer();
        let message = object(&[
            ("id", &id.into()),
            ("bucket", &bucket.into()),
            ("url", &url.into()),
            ("bytes", &bytes),
        ]);
        let answer = Promise::new(&mut |resolve, _| {
            self.state.waiting.borrow_mut().insert(id, resolve);
        });
        self.port.post_message_with_transferable(&message, &js_sys::Array::of1(&bytes))?;
        let answer = within(LIMIT_MS, JsFuture::from(answer), "the worker that stores does not answer").await;
        let answer = answer.inspect_err(|_| self.state.listens.set(false))?;
        if let Ok(spare) = get(&answer, "bytes").dyn_into() {
            self.state.spare.borrow_mut().push(spare);
        }
        let error = get(&answer, "error");
        match get(&answer, "hash").as_string() {
            Some(hash) if error.is_undefined() => Ok(hash),
            _ => Err(error.into()),
        }
    }
}

fn get(object: &JsValue, key: &str) -> JsValue {
    Reflect::get(object, &key.into()).unwrap_or(JsValue::UNDEFINED)
}

fn object(members: &[(&str, &JsValue)]) -> Object {
    let object = Object::new();
    for (key, value) in members {
        // Setting a member of a plain object cannot fail.
        let _ = Reflect::set(&object, &(*key).into(), value);
    }
    object
}
