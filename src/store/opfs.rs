//! Files of the origin private file system, read and written synchronously: ten times as fast as the Cache API.
//! Nothing waits for the disk: what a lost power supply leaves of them is found by the hashes.

use super::browser::{describe, error_name, scope, sleep};
use super::db::Refusal;
use crate::error::{Error, Result};
use crate::image::{Sink, Source};
use js_sys::{Object, Promise, Reflect, Uint8Array};
use std::mem::MaybeUninit;
use std::ops::Range;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::Blob;

/// The folder of the images: a file for each generation.
pub const IMAGES: &str = "qandle-images";
/// The folder of the chunks: a file for each generation.
pub const WEIGHTS: &str = "qandle-weights";

/// Bytes that are written at a time. Chromium takes eight times as long for the same bytes by 8 MiB.
const PIECE: u32 = 1 << 20;
/// A file that another tab or worker has open is tried again so often and so much later, ms.
const TRIES: usize = 20;
const WAIT_MS: i32 = 100;

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
    #[wasm_bindgen(method, catch, js_name = getFile)]
    fn blob(this: &Entry) -> std::result::Result<Promise, JsValue>;

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
    #[wasm_bindgen(method, catch, js_name = getSize)]
    fn size(this: &Handle) -> std::result::Result<f64, JsValue>;
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
    pub async fn read(folder: &str, name: &str) -> std::result::Result<Self, Refusal> {
        let entry = entry(folder, name, false).await?;
        // Where the mode is not known, nobody else may read meanwhile.
        let handle = JsFuture::from(entry.open(&with("mode", &"read-only".into()))?).await?;
        Ok(Self(handle.unchecked_into()))
    }

    /// Makes an empty file, to write it.
    ///
    /// # Errors
    /// As [`File::read`].
    pub async fn write(folder: &str, name: &str) -> std::result::Result<Self, Refusal> {
        let file = Self::update(folder, name).await?;
        file.0.truncate(0.0)?;
        Ok(file)
    }

    /// Opens a file to write some of it; makes one where there is none. Waits a little for others that have it open.
    ///
    /// # Errors
    /// As [`File::read`].
    pub async fn update(folder: &str, name: &str) -> std::result::Result<Self, Refusal> {
        let entry = entry(folder, name, true).await?;
        for _ in 0..TRIES {
            match JsFuture::from(entry.open(&Object::new())?).await {
                Err(error) if error_name(&error) == "NoModificationAllowedError" => {
                    sleep(WAIT_MS, None).await
                }
                other => return Ok(Self(other?.unchecked_into())),
            }
        }
        Err(JsValue::from("the file is open elsewhere").into())
    }

    /// Writes bytes at a position.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn put_bytes(&self, at: u64, bytes: &Uint8Array) -> std::result::Result<(), Refusal> {
        let mut from = 0;
        while from < bytes.length() {
            let piece = bytes.subarray(from, bytes.length().min(from + PIECE));
            let place = with("at", &((at + u64::from(from)) as f64).into());
            if self.0.write(&piece, &place)? != f64::from(piece.length()) {
                let message = "not all bytes were written".into();
                return Err(Refusal { full: true, locked: false, message });
            }
            from += piece.length();
        }
        Ok(())
    }

    /// Fills `bytes` from a position. Says whether there were as many.
    ///
    /// # Errors
    /// Where they cannot be read.
    pub fn get_bytes(&self, at: u64, bytes: &Uint8Array) -> std::result::Result<bool, Refusal> {
        let n = self.0.read(bytes, &with("at", &(at as f64).into()))?;
        Ok(n == f64::from(bytes.length()))
    }

    /// Its bytes.
    ///
    /// # Errors
    /// Where it cannot be asked.
    pub fn size(&self) -> std::result::Result<f64, Refusal> {
        Ok(self.0.size()?)
    }
}

impl Sink for File {
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the view is used at once, before anything can grow the memory under it.
        let view = unsafe { Uint8Array::view(bytes) };
        self.put_bytes(at, &view)
            .map_err(|why| Error::out_of_memory(format!("the image could not be written: {}", why.message)))
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

/// Bytes of a file as they are now, whoever has it open; `None` where there are not as many.
///
/// # Errors
/// Where there is no such file, or it is written meanwhile.
pub async fn bytes(
    folder: &str,
    name: &str,
    range: Range<u64>,
) -> std::result::Result<Option<Uint8Array>, Refusal> {
    let entry = entry(folder, name, false).await?;
    let blob: Blob = JsFuture::from(entry.blob()?).await?.unchecked_into();
    let part = blob.slice_with_f64_and_f64(range.start as f64, range.end as f64)?;
    let bytes = Uint8Array::new(&JsFuture::from(part.array_buffer()).await?);
    Ok(Some(bytes).filter(|bytes| u64::from(bytes.length()) == range.end - range.start))
}

/// Removes a file; one that is not there is no fault. Waits a little for others that have it open.
pub async fn remove(folder: &str, name: &str) {
    remove_within(folder, name, TRIES).await;
}

/// Removes a file that nobody has open.
pub async fn remove_unused(folder: &str, name: &str) {
    remove_within(folder, name, 1).await;
}

async fn remove_within(folder: &str, name: &str, tries: usize) {
    let Ok(folder) = open_folder(folder, false).await else { return };
    for again in (0..tries).rev() {
        let Ok(removed) = folder.remove(name) else { return };
        match JsFuture::from(removed).await {
            Err(error) if again > 0 && error_name(&error) == "NoModificationAllowedError" => {
                sleep(WAIT_MS, None).await;
            }
            // Removed, or not there; whatever else stands against it, the next sweep tries it again.
            _ => return,
        }
    }
}

/// The names of all files.
pub async fn names(folder: &str) -> Vec<String> {
    let mut names = Vec::new();
    let Ok(folder) = open_folder(folder, false).await else { return names };
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

async fn entry(folder: &str, name: &str, create: bool) -> std::result::Result<Entry, JsValue> {
    let file = open_folder(folder, create).await?.file(name, &with("create", &create.into()))?;
    Ok(JsFuture::from(file).await?.unchecked_into())
}

async fn open_folder(name: &str, create: bool) -> std::result::Result<Folder, JsValue> {
    let storage = Reflect::get(&scope().navigator(), &"storage".into())?;
    let get = Reflect::get(&storage, &"getDirectory".into())?
        .dyn_into::<js_sys::Function>()
        .map_err(|_| JsValue::from("there is no file system"))?;
    let root: Folder =
        JsFuture::from(get.call0(&storage)?.unchecked_into::<Promise>()).await?.unchecked_into();
    let folder = JsFuture::from(root.folder(name, &with("create", &create.into()))?).await?;
    Ok(folder.unchecked_into())
}

fn with(key: &str, value: &JsValue) -> Object {
    let options = Object::new();
    // Setting a member of a plain object cannot fail.
    let _ = Reflect::set(&options, &key.into(), value);
    options
}
