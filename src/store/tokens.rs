//! The record of token ids that goes from visit to visit (`tokenizer/kept.rs` says what is in it): one value, changed in
//! one transaction, so that tabs do not lose each other's.

use super::db::{Db, Refusal, Table};
use js_sys::Uint8Array;
use wasm_bindgen::{JsCast, JsValue};

const KEY: &str = "ids";

/// The record; empty where there is none, or one of more than `most` bytes.
///
/// # Errors
/// Where the browser has no IndexedDB, or refuses it.
pub async fn read(most: usize) -> Result<Vec<u8>, Refusal> {
    let value = Db::open().await?.get(Table::Tokens, KEY).await?;
    Ok(value.map_or_else(Vec::new, |value| bytes(&value, most)))
}

/// Replaces the record by what `change` makes of it.
///
/// # Errors
/// As [`read`], and where there is no room.
pub async fn update(most: usize, change: impl FnOnce(&[u8]) -> Vec<u8> + 'static) -> Result<(), Refusal> {
    let change = move |value: Option<JsValue>| {
        let record = value.map_or_else(Vec::new, |value| bytes(&value, most));
        Some(Uint8Array::from(&change(&record)[..]).into())
    };
    Db::open().await?.update(Table::Tokens, KEY, change).await.map(drop)
}

/// Forgets the record.
///
/// # Errors
/// As [`read`].
pub async fn clear() -> Result<(), Refusal> {
    Db::open().await?.delete(Table::Tokens, &[KEY.to_string()]).await
}

fn bytes(value: &JsValue, most: usize) -> Vec<u8> {
    let array = value.dyn_ref::<Uint8Array>().filter(|array| array.length() as usize <= most);
    array.map_or_else(Vec::new, Uint8Array::to_vec)
}
