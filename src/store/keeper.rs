//! A worker beside this one that hashes and stores chunks, and reads them, where the page can make one. Chromium does all of
//! it on the thread that asks: a third of a cold load, half of a warm one. In Firefox, which does not, what two workers send
//! each other passes through a third process: a cold load then takes a quarter longer than without.

use super::browser::{scope, within};
use super::db::Refusal;
use js_sys::{ArrayBuffer, Object, Promise, Reflect, Uint8Array};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{MessageChannel, MessageEvent, MessagePort};

/// A worker that is not there by then is not waited for, ms.
const START_MS: i32 = 3000;
/// A chunk that is not stored by then never will be, ms.
const STORED_MS: i32 = 20_000;
/// A chunk that is not read by then is read here, ms.
const READ_MS: i32 = 10_000;

/// The worker's port.
pub struct Keeper {
    port: MessagePort,
    state: Rc<State>,
    /// Resolves when the worker is there.
    there: Promise,
    _listener: Closure<dyn FnMut(MessageEvent)>,
}

#[derive(Default)]
struct State {
    listens: Cell<bool>,
    /// It was waited for too long: whatever it says later, it is not asked again.
    given_up: Cell<bool>,
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
    /// Whether this browser gains by one: Chromium's kind does, of the secure contexts in which there are hashes.
    pub fn is_worth_it() -> bool {
        Reflect::has(&scope().navigator(), &"userAgentData".into()).unwrap_or(false)
    }

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
            heard.listens.set(!heard.given_up.get());
            let resolve = heard.waiting.borrow_mut().remove(&(id as u32));
            if let Some(resolve) = resolve {
                // A promise's resolver does not throw.
                let _ = resolve.call1(&JsValue::NULL, &data);
            }
        });
        port.set_onmessage(Some(listener.as_ref().unchecked_ref()));
        let there = Promise::new(&mut |resolve, _| {
            state.waiting.borrow_mut().insert(0, resolve);
        });
        post.call1(&JsValue::NULL, &wanted)?;
        Ok(Self { port, state, there, _listener: listener })
    }

    /// Waits until it is there, if it ever will be.
    pub async fn start(&self) {
        if !self.listens() && !self.state.given_up.get() {
            let there = within(START_MS, JsFuture::from(self.there.clone()), "").await;
            if there.is_err() {
                self.give_up();
            }
        }
    }

    /// Ends it, if it is there, or once it is.
    fn give_up(&self) {
        self.state.given_up.set(true);
        self.state.listens.set(false);
        // If it never is there, nothing hears it.
        let _ = self.port.post_message(&JsValue::NULL);
    }

    /// Closes the files that it has open.
    pub async fn close_files(&self) {
        if self.listens() {
            // One that does not answer is none any more, and its files are closed with it.
            let _ = self.ask_for(&JsValue::UNDEFINED, None, READ_MS).await;
        }
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
    pub async fn keep(&self, place: &Object, bytes: &Uint8Array) -> Result<String, Refusal> {
        let answer = self.ask_for(place, Some(&bytes.buffer()), STORED_MS).await?;
        if let Ok(spare) = get(&answer, "bytes").dyn_into() {
            self.state.spare.borrow_mut().push(spare);
        }
        let error = get(&answer, "error");
        match get(&answer, "hash").as_string() {
            Some(hash) if error.is_undefined() => Ok(hash),
            _ => Err(error.into()),
        }
    }

    /// What is stored at a place; `None` where nothing is, or it does not say.
    pub async fn read(&self, place: &Object) -> Option<Uint8Array> {
        let answer = self.ask_for(place, None, READ_MS).await.ok()?;
        let bytes = get(&answer, "bytes").dyn_into::<ArrayBuffer>().ok()?;
        Some(Uint8Array::new(&bytes))
    }

    async fn ask_for(
        &self,
        place: &JsValue,
        bytes: Option<&ArrayBuffer>,
        ms: i32,
    ) -> Result<JsValue, JsValue> {
        let id = self.state.next.get() + 1;
        self.state.next.set(id);
        let message = object(&[("id", &id.into()), ("place", place)]);
        let answer = Promise::new(&mut |resolve, _| {
            self.state.waiting.borrow_mut().insert(id, resolve);
        });
        match bytes {
            Some(bytes) => {
                Reflect::set(&message, &"bytes".into(), bytes)?;
                self.port.post_message_with_transferable(&message, &js_sys::Array::of1(bytes))?;
            }
            None => self.port.post_message(&message)?,
        }
        let answer = within(ms, JsFuture::from(answer), "the worker that stores does not answer").await;
        answer.inspect_err(|_| self.give_up())
    }
}

fn get(object: &JsValue, key: &str) -> JsValue {
    Reflect::get(object, &key.into()).unwrap_or(JsValue::UNDEFINED)
}

/// A plain object.
pub(super) fn object(members: &[(&str, &JsValue)]) -> Object {
    let object = Object::new();
    for (key, value) in members {
        // Setting a member of a plain object cannot fail.
        let _ = Reflect::set(&object, &(*key).into(), value);
    }
    object
}
