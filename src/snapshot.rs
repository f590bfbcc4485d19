//! Sessions on their way to a disk and back: a row, which says what the session is, and the bytes of its pages. What comes
//! back is used where model, layout, row and page are the ones that were written, up to the first page that is not.

use crate::error::Result;
use crate::kv_cache::{Budget, KvCache, KvShape, Page, PAGE};
use crate::session::Session;
use crate::sum::{hex, Sum};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Version of rows and of the pages' layout; those of another are as good as absent.
const VERSION: u32 = 2;

/// Longest history that a row is believed to have, and the bytes of its pages.
const MOST_TOKENS: usize = 1 << 20;
const MOST_BYTES: u64 = 1 << 40;

/// What is written of a session beside its pages, as JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    version: u32,
    /// The session's name.
    pub id: String,
    /// Who computed the pages: [`crate::image::Identity`].
    pub model: String,
    shape: KvShape,
    /// Pages of the window that the pages were computed with, and those behind the first that it has dropped.
    window: Option<usize>,
    dropped: usize,
    /// Token ids in order.
    pub tokens: Vec<u32>,
    /// Leading tokens that other sessions may take over.
    offered: usize,
    /// In order.
    pages: Vec<Stored>,
    /// Bytes of all pages.
    pub bytes: u64,
    /// ms since the epoch.
    pub created_at: f64,
    /// ms since the epoch.
    pub used_at: f64,
    /// [`Sum`] of the rest.
    sum: u64,
}

/// The name of a session's row: each model has its own sessions.
pub fn row_of(model: &str, id: &str) -> String {
    format!("{model}/{id}")
}

/// What the names of a session's pages begin with, and no other session's, by the name of its row.
pub fn pages_of(row: &str) -> String {
    format!("{}/", hex(&Sha256::digest(row)[..12]))
}

/// A page that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    /// What it was computed of: model and tokens.
    prefix: String,
    /// [`Sum`] of its bytes: behind the last position of a page that is not full may be anything.
    sum: u64,
}

impl Row {
    /// The row of a session, and the names and bytes of those of its pages that `before` has not. Where these are more than
    /// `most`, it is the row of a session that ends there.
    pub fn of(
        id: &str,
        model: &str,
        session: &Session,
        before: Option<&Row>,
        most: usize,
    ) -> (Self, Vec<(String, Vec<u8>)>) {
        let Session { tokens, cache, offered, created_at, used_at } = session;
        let mut row = Self {
            version: VERSION,
            id: id.to_string(),
            model: model.to_string(),
            shape: cache.shape(),
            window: cache.window(),
            dropped: cache.dropped(),
            tokens: tokens.clone(),
            offered: *offered,
            bytes: 0,
            pages: Vec::new(),
            // A fraction may not be read as it was written, and the sum be wrong.
            created_at: created_at.round(),
            used_at: used_at.round(),
            sum: 0,
        };
        let (mut hash, mut fresh) = (Sha256::new(), Vec::new());
        hash.update(model);
        hash.update(format!("{:?} {:?}", row.shape, row.window));
        for (n, part) in tokens.chunks(PAGE).enumerate() {
            part.iter().for_each(|token| hash.update(token.to_le_bytes()));
            let Some(page) = row.place(n).and_then(|i| cache.pages().get(i)) else { continue };
            let prefix = hex(&hash.clone().finalize()[..12]);
            let kept = before.and_then(|row| row.page(n)).filter(|page| page.prefix == prefix);
            if kept.is_none() && fresh.len() == most {
                row.tokens.truncate(n * PAGE);
                break;
            }
            let stored = kept.cloned().unwrap_or_else(|| {
                let bytes = page.to_bytes();
                let stored = Stored { prefix, sum: Sum::of(&bytes) };
                fresh.push((row.key(n, &stored), bytes));
                stored
            });
            row.pages.push(stored);
        }
        if row.pages.is_empty() {
            row.dropped = 0;
        }
        row.bytes = row.pages.len() as u64 * row.shape.page_bytes() as u64;
        row.sum = row.digest();
        (row, fresh)
    }

    /// The names under which the bytes of its pages are kept.
    pub fn keys(&self) -> Vec<String> {
        self.pages.iter().enumerate().map(|(i, page)| self.key(self.number(i), page)).collect()
    }

    /// The name of the text's page `n`.
    fn key(&self, n: usize, page: &Stored) -> String {
        format!("{}{n}/{}-{:x}", pages_of(&row_of(&self.model, &self.id)), page.prefix, page.sum)
    }

    /// Which of the pages that are held is the text's page `n`.
    fn place(&self, n: usize) -> Option<usize> {
        match n {
            0 => Some(0),
            _ => n.checked_sub(self.dropped).filter(|i| *i > 0),
        }
    }

    /// Which page of the text is the `i`th that is held.
    fn number(&self, i: usize) -> usize {
        if i == 0 {
            0
        } else {
            i + self.dropped
        }
    }

    fn page(&self, n: usize) -> Option<&Stored> {
        self.pages.get(self.place(n)?)
    }

    /// A row out of its text; `None` where it is none of this version, or damaged.
    pub fn read(text: &str) -> Option<Self> {
        let row: Row = serde_json::from_str(text).ok()?;
        let sound = row.version == VERSION
            && row.tokens.len() <= MOST_TOKENS
            && row.shape.checked_page_bytes().and_then(|n| n.checked_mul(row.pages.len() as u64))
                == Some(row.bytes)
            && row.bytes <= MOST_BYTES
            && row.dropped <= MOST_TOKENS
            && (row.dropped == 0 || row.window.is_some() && !row.pages.is_empty())
            && row.pages.len() + row.dropped == row.tokens.len().div_ceil(PAGE)
            && row.sum == row.digest();
        sound.then_some(row)
    }

    /// The text for [`Row::read`].
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Whether it is this session of this model, with caches of this shape and window.
    pub fn fits(&self, model: &str, id: &str, shape: KvShape, window: Option<usize>) -> bool {
        (self.model.as_str(), self.id.as_str()) == (model, id) && (self.shape, self.window) == (shape, window)
    }

    fn digest(&self) -> u64 {
        let rest = Self { sum: 0, ..self.clone() };
        Sum::of(rest.text().as_bytes())
    }
}

/// A session on its way back, page by page.
pub struct Restoring {
    row: Row,
    pages: Vec<Arc<Page>>,
    budget: Arc<Budget>,
}

impl Restoring {
    /// Of a row that fits.
    pub fn new(row: Row) -> Self {
        Self { row, pages: Vec::new(), budget: Arc::default() }
    }

    /// From now on its pages are made within a budget.
    pub fn within(mut self, budget: Arc<Budget>) -> Self {
        self.budget = budget;
        self
    }

    /// The name of the next page's bytes; `None`: there is none.
    pub fn next(&self) -> Option<String> {
        let i = self.pages.len();
        self.row.pages.get(i).map(|page| self.row.key(self.row.number(i), page))
    }

    /// Takes the next page's bytes; `false`: they are not the ones that were written, and what follows is of no use.
    ///
    /// # Errors
    /// `out_of_memory`.
    pub fn push(&mut self, bytes: &[u8]) -> Result<bool> {
        let wanted = self.row.pages.get(self.pages.len()).map(|page| page.sum);
        if wanted != Some(Sum::of(bytes)) {
            return Ok(false);
        }
        let page = Page::from_bytes(self.row.shape, bytes, &self.budget)?;
        let sound = page.is_some();
        self.pages.extend(page.map(Arc::new));
        Ok(sound)
    }

    /// The session, as far as its pages came.
    pub fn finish(self) -> Session {
        let Self { row, pages, budget } = self;
        let cache =
            KvCache::of_pages(row.shape, row.window, pages, row.dropped, row.tokens.len()).within(budget);
        let mut tokens = row.tokens;
        tokens.truncate(cache.position());
        let offered = row.offered.min(tokens.len());
        Session { tokens, cache, offered, created_at: row.created_at, used_at: row.used_at }
    }
}
