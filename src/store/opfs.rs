//! Files of the origin private file system, read and written synchronously: ten times as fast as the Cache API.

use super::browser::{describe, scope};
use super::db::Refusal;
use crate::error::{Error, Result};
use crate::image::{Sink, Source};
use js_sys::{Object, Promise, Reflect, Uint8Array};
use std::mem::MaybeUninit;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

const FOLDER: &str = "qandle-images";

#[wasm_bindgen]
extern "C" {
    /// `FileSystemDirectoryHandle`
    type Folder;
    #[wasm_bindgen(method, catch, js_name = getDirectoryHandle)]
    fn folder(this: &Folder, name: &str, options: &Object) -> std::result::Result<Promise, JsValue>;
    #[wasm_bindgen(method, catch, js_name = getFileHandle)]
    fn file(this: &Folder, name: &str, options: &Object) -> std::result::Result<Promise, JsValue>;
    #[wasm_bindgen(method, catch)]
    fn keys(this: &Folder) -> std::result::Result<js_sys::AsyncIterator, JsValue>;
    #[wasm_bindgen(method, catch, js_name = removeEntry)]
    fn remove(this: &Folder, name: &str) -> std::result::Result<Promise, JsValue>;

    /// `FileSystemFileHandle`
    type Entry;
    #[wasm_bindgen(method, catch, js_name = createSyncAccessHandle)]
    fn open(this: &Entry, options: &Object) -> std::result::Result<Promise, JsValue>;

    /// `FileSystemSyncAccessHandle`
    type Handle;
    #[wasm_bindgen(method, catch)]
    fn read(this: &Handle, bytes: &Uint8Array, options: &Object) -> std::result::Result<f64, JsValue>;
    #[wasm_bindgen(method, catch)]
    fn write(this: &Handle, bytes: &Uint8Array, options: &Object) -> std::result::Result<f64, JsValue>;
    #[wasm_bindgen(method, catch)]
    fn truncate(this: &Handle, bytes: f64) -> std::result::Result<(), JsValue>;
    #[wasm_bindgen(method, catch)]
    fn flush(this: &Handle) -> std::result::Result<(), JsValue>;
    #[wasm_bindgen(method)]
    fn close(this: &Handle);
}

/// An open file; closed when it is dropped.
pub struct File(Handle);

impl Drop for File {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl File {
    /// Opens a file that is there, to read it beside others that do.
    ///
    /// # Errors
    /// Where it is not there, is being written, or the browser has no such files.
    pub async fn read(name: &str) -> std::result::Result<Self, Refusal> {
        let entry: Entry =
            JsFuture::from(folder(false).await?.file(name, &Object::new())?).await?.unchecked_into();
        // Where the mode is not known, nobody else may read meanwhile.
        let handle = JsFuture::from(entry.open(&with("mode", &"read-only".into()))?).await?;
        Ok(Self(handle.unchecked_into()))
    }

    /// Makes an empty file, to write it.
    ///
    /// # Errors
    /// As [`File::read`].
    pub async fn write(name: &str) -> std::result::Result<Self, Refusal> {
        let entry = folder(true).await?.file(name, &with("create", &true.into()))?;
        let entry: Entry = JsFuture::from(entry).await?.unchecked_into();
        let file = Self(JsFuture::from(entry.open(&Object::new())?).await?.unchecked_into());
        file.0.truncate(0.0)?;
        Ok(file)
    }

    /// Waits until all is on the disk.
    ///
    /// # Errors
    /// Where it cannot be.
    pub fn flush(&self) -> std::result::Result<(), Refusal> {
        Ok(self.0.flush()?)
    }
}

impl Sink for File {
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the view is used at once, before anything can grow the memory under it.
        let view = unsafe { Uint8Array::view(bytes) };
        let full = |why: String| Error::out_of_memory(format!("the image could not be written: {why}"));
        match self.0.write(&view, &with("at", &(at as f64).into())) {
            Ok(n) if n == bytes.len() as f64 => Ok(()),
            Ok(n) => Err(full(format!("{n} of {} bytes were", bytes.len()))),
            Err(error) => Err(full(describe(&error))),
        }
    }
}

impl Source for File {
    fn get<'a>(&mut self, at: u64, room: &'a mut [MaybeUninit<u8>]) -> Result<&'a [u8]> {
        let start = room.as_mut_ptr().cast::<u8>();
        // SAFETY: the view is used at once, before anything can grow the memory under it; nothing reads it before it is filled.
        let view = unsafe { Uint8Array::view_mut_raw(start, room.len()) };
        match self.0.read(&view, &with("at", &(at as f64).into())) {
            // SAFETY: the file's bytes were written to all of it.
            Ok(n) if n == room.len() as f64 => Ok(unsafe { std::slice::from_raw_parts(start, room.len()) }),
            Ok(_) => Err(Error::integrity("the image ends too early")),
            Err(error) => Err(Error::integrity(format!("the image cannot be read: {}", describe(&error)))),
        }
    }
}

/// Removes a file; one that is not there is no fault.
pub async fn remove(name: &str) {
    let Ok(folder) = folder(false).await else { return };
    if let Ok(removed) = folder.remove(name) {
        // It is rejected where there is none, or where another tab reads it: then it goes another time.
        let _ = JsFuture::from(removed).await;
    }
}

/// The names of all files.
pub async fn names() -> Vec<String> {
    let mut names = Vec::new();
    let Ok(folder) = folder(false).await else { return names };
    let Ok(keys) = folder.keys() else { return names };
    while let Ok(next) = keys.next() {
        let Ok(next) = JsFuture::from(next).await else { break };
        match Reflect::get(&next, &"value".into()).ok().and_then(|name| name.as_string()) {
            Some(name) => names.push(name),
            None => break,
        }
    }
    names
}

async fn folder(create: bool) -> std::result::Result<Folder, JsValue> {
    let storage = Reflect::get(&scope().navigator(), &"storage".into())?;
    let get = Reflect::get(&storage, &"getDirectory".into())?
        .dyn_into::<js_sys::Function>()
        .map_err(|_| JsValue::from("there is no file system"))?;
    let root: Folder =
        JsFuture::from(get.call0(&storage)?.unchecked_into::<Promise>()).await?.unchecked_into();
    let folder = JsFuture::from(root.folder(FOLDER, &with("create", &create.into()))?).await?;
    Ok(folder.unchecked_into())
}

fn with(key: &str, value: &JsValue) -> Object {
    let options = Object::new();
    // Setting a member of a plain object cannot fail.
    let _ = Reflect::set(&options, &key.into(), value);
    options
}
