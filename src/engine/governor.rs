//! The governor: one budget over all that fills the engine's memory, and the order in which caches give it back.
//!
//! Wasm memory only grows, so what counts is the bytes in use: weights and what a pass needs stay; KV pages, kept answers and
//! token ids share the rest. A page that would pass a bound is not made ([`Budget`]), nor is one that the browser gives no
//! memory for; then the least missed goes, until there is room: work ahead, kept answers, token ids, the nameless session,
//! the warmed-up beginning, sessions that are on disk, the other sessions. Only what is still in the way then is
//! `out_of_memory`, for the one request.

use super::{context_length, held_bytes, Engine, Options};
use crate::config::head_dim;
use crate::error::{Error, Result};
use crate::kv_cache::{Budget, KvCache};
use crate::weights::Plan;
use std::sync::Arc;

/// What wasm can address.
const WASM_BYTES: u64 = 4 << 30;
/// Bytes for code, stack, tokenizer, one pass's activations, and what lies free between allocations.
pub const SCRATCH_BYTES: u64 = 48 << 20;
/// Of the device's memory, what a page may take.
const DEVICE_SHARE: f64 = 0.5;
/// Tokens of a slice at most.
const PASS_TOKENS: usize = 128;

/// Who may fill how much.
pub(super) struct Governor {
    /// Bytes in use at most.
    ceiling: u64,
    /// Bytes that no cache can give back.
    fixed: u64,
    /// All KV pages.
    pages: Arc<Budget>,
    /// Bytes of pages that caches may hold; what a turn alone needs may pass this.
    kv_bytes: u64,
    /// Largest buffers of a pass, bytes.
    pass_bytes: usize,
    /// Whether sessions were given the time to be written.
    waited: bool,
}

impl Governor {
    pub(super) fn new(plan: &Plan, options: &Options) -> Result<Self> {
        let config = &plan.config;
        let context = context_length(plan, options)?;
        let fixed = fixed_bytes(plan, context) + SCRATCH_BYTES;
        let whole = fixed + held_bytes(plan, options, context);
        // Whatever the device, the context that was planned can be filled.
        let device = options.device_bytes.map_or(WASM_BYTES, |bytes| (bytes as f64 * DEVICE_SHARE) as u64);
        let ceiling = options.limits.memory_bytes.unwrap_or(device.max(whole)).min(WASM_BYTES);
        let width = 2 * config.intermediate_size + 4 * config.hidden_size;
        Ok(Self {
            ceiling,
            fixed,
            pages: Arc::default(),
            kv_bytes: options.limits.kv_bytes,
            pass_bytes: 4 * (PASS_TOKENS * width + 2 * config.vocab_size),
            waited: false,
        })
    }
}

/// Weights and rotary table.
pub(super) fn fixed_bytes(plan: &Plan, context: usize) -> u64 {
    plan.packed_bytes + context as u64 * head_dim(&plan.config) as u64 * 4
}

impl Engine {
    /// The budget of all KV pages.
    pub fn page_budget(&self) -> Arc<Budget> {
        self.governor.pages.clone()
    }

    /// Bytes that the weights and the work on them take.
    pub fn fixed_bytes(&self) -> u64 {
        self.governor.fixed
    }

    /// An empty cache within the budget.
    pub(super) fn new_cache(&self) -> KvCache {
        self.model.new_cache().within(self.page_budget())
    }

    /// Bytes of pages that there may be beside the other caches.
    fn most_pages(&self) -> u64 {
        let others = self.responses.bytes() + self.text.token_cache_bytes();
        self.governor.ceiling.saturating_sub(self.governor.fixed + others as u64)
    }

    fn bound_pages(&self) {
        self.governor.pages.bound(self.most_pages().min(self.governor.kv_bytes));
    }

    /// Before a turn of so many prompt tokens: others make way for what a pass needs beside the pages.
    ///
    /// # Errors
    /// `out_of_memory` where the prompt would not fit if it were alone; nothing makes way for it.
    pub(super) fn check_room(&mut self, tokens: usize) -> Result<()> {
        let most = self.governor.ceiling.saturating_sub(self.governor.fixed);
        let needed = self.new_cache().planned_bytes(tokens);
        if needed > most {
            return Err(Error::out_of_memory(format!(
                "the KV cache of {tokens} tokens needs {needed} bytes, the memory has room for {most}"
            )));
        }
        self.keep_within();
        // Buffers of a pass cannot be refused without ending the engine, so room for them is asked for here.
        let room = |bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
        while !room(self.governor.pass_bytes) && self.evict(true) {}
        Ok(())
    }

    /// Evicts as long as more is in use than may be.
    pub(super) fn keep_within(&mut self) {
        while self.governor.pages.used() > self.most_pages() && self.evict(true) {}
        self.bound_pages();
    }

    /// After a page could not be made: something is given up, and the same can be tried again.
    ///
    /// # Errors
    /// `out_of_memory` for the reason `why` where nothing is left to give up.
    pub(super) fn make_room(&mut self, why: String) -> Result<()> {
        let page = self.new_cache().shape().page_bytes() as u64;
        let refused = self.governor.pages.room() >= page;
        if refused {
            // The browser gives no more, whatever the budget says: from now on caches stay below that.
            self.governor.kv_bytes = self.governor.kv_bytes.min(self.governor.pages.used());
        }
        self.clear(page, refused).map(drop).map_err(|_| Error::out_of_memory(why))
    }

    /// Makes room for so many bytes of pages. `false`: for that, sessions that left must be written first.
    ///
    /// # Errors
    /// `out_of_memory` where there is none.
    pub fn make_room_for(&mut self, bytes: u64) -> Result<bool> {
        self.clear(bytes, false)
    }

    fn clear(&mut self, bytes: u64, refused: bool) -> Result<bool> {
        if std::mem::take(&mut self.governor.waited) {
            // Nobody has taken them.
            self.sessions.drop_leaving();
        }
        self.bound_pages();
        let pages = self.page_budget();
        while pages.room() < bytes {
            let room = |engine: &Self| engine.most_pages().saturating_sub(pages.used());
            // Answers and token ids are no pages: they stay where only the bound of pages is passed.
            let all = refused || room(self) < bytes;
            if self.sessions.is_leaving() {
                self.governor.waited = true;
                return Ok(false);
            }
            if self.evict(all) {
                self.bound_pages();
            } else if !refused && room(self) >= bytes {
                // What is left are turns under way.
                pages.bound(self.most_pages());
            } else {
                return Err(Error::out_of_memory(format!(
                    "{bytes} bytes of KV pages, {} are left",
                    room(self)
                )));
            }
        }
        Ok(true)
    }

    /// Gives up the one thing that is missed least, of all or of what holds pages. `false`: nothing is left.
    fn evict(&mut self, all: bool) -> bool {
        self.ahead.take().is_some()
            || (all && (self.responses.evict() || self.text.drop_token_cache()))
            || self.sessions.evict(None)
    }
}
