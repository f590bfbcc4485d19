//! Model files between visits. Rows of [`manifest::Manifest`] in IndexedDB say which chunks of which file are there; the
//! chunks lie in origin-private files, in IndexedDB or in the Cache API. What it hands on are plain bytes in file order.

pub mod manifest;

#[cfg(target_arch = "wasm32")]
pub mod browser;
#[cfg(target_arch = "wasm32")]
mod chunks;
#[cfg(target_arch = "wasm32")]
mod db;
#[cfg(target_arch = "wasm32")]
pub mod keeper;
#[cfg(target_arch = "wasm32")]
mod keeping;
#[cfg(target_arch = "wasm32")]
pub mod opfs;
#[cfg(target_arch = "wasm32")]
pub mod reader;
#[cfg(target_arch = "wasm32")]
pub mod remote;
#[cfg(target_arch = "wasm32")]
mod sessions;
#[cfg(target_arch = "wasm32")]
mod shelf;
#[cfg(target_arch = "wasm32")]
pub mod source;
#[cfg(target_arch = "wasm32")]
mod stream;
#[cfg(target_arch = "wasm32")]
pub mod tokens;

#[cfg(target_arch = "wasm32")]
pub use db::Refusal;
#[cfg(target_arch = "wasm32")]
pub use shelf::Store;
