//! Qandle: Qwen2-family language models on the visitor's own CPU, inside the browser.
//!
//! Bytes become weights ([`gguf`], [`safetensors`], [`weights`]), weights a model ([`model`]), a model with a [`kv_cache`] a generation
//! ([`generation`], [`schedule`]), and [`worker`] carries it over messages to the page. A module uses only what stands before it here,
//! but for the attention kernel, which reads the pages of [`kv_cache`].
//! Only `worker`, `store` and `page` know that JavaScript exists; all the rest builds and is tested natively.

pub mod error;

#[cfg(feature = "engine")]
pub mod metrics;

#[cfg(feature = "engine")]
pub mod kernels;

#[cfg(feature = "engine")]
pub mod table_mark;

#[cfg(feature = "engine")]
pub mod sum;

#[cfg(feature = "engine")]
pub mod gguf;

#[cfg(feature = "engine")]
pub mod safetensors;

#[cfg(feature = "engine")]
pub mod kv_cache;

#[cfg(feature = "engine")]
pub mod config;

#[cfg(feature = "engine")]
pub mod model;

#[cfg(feature = "engine")]
pub mod weights;

#[cfg(feature = "engine")]
pub mod tokenizer;

#[cfg(feature = "engine")]
pub mod template;

#[cfg(feature = "engine")]
pub mod sampler;

#[cfg(feature = "engine")]
pub mod stream;

#[cfg(feature = "engine")]
pub mod session;

#[cfg(feature = "engine")]
pub mod snapshot;

#[cfg(feature = "engine")]
pub mod speculation;

#[cfg(feature = "engine")]
pub mod generation;

#[cfg(feature = "engine")]
pub mod schedule;

#[cfg(feature = "engine")]
pub mod response_cache;

#[cfg(feature = "engine")]
pub mod openai;

#[cfg(feature = "engine")]
pub mod engine;

#[cfg(feature = "engine")]
pub mod image;

#[cfg(feature = "engine")]
pub mod store;

#[cfg(all(feature = "engine", target_arch = "wasm32"))]
pub mod worker;

#[cfg(feature = "page")]
pub mod page;

pub use error::{Error, Result};
