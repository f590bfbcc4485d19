//! Sessions in the store: a row and the pages that it names, put and deleted in one transaction.

use super::db::{Change, Refusal, Table};
use super::Store;
use crate::error::Result;
use crate::kv_cache::Budget;
use crate::session::Session;
use crate::snapshot::{pages_of, row_of, Restoring, Row};
use js_sys::Uint8Array;
use std::collections::HashSet;
use std::sync::Arc;
use wasm_bindgen::{JsCast, JsValue};

const TABLES: [Table; 2] = [Table::Sessions, Table::Pages];

impl Store {
    /// All rows of sessions, the last used first.
    pub async fn sessions(&self) -> std::result::Result<Vec<Row>, Refusal> {
        let texts = self.db().all(Table::Sessions).await?;
        let mut rows: Vec<Row> = texts.iter().filter_map(|text| Row::read(&text.as_string()?)).collect();
        rows.sort_by(|a, b| b.used_at.total_cmp(&a.used_at));
        Ok(rows)
    }

    /// Whether any model has a session of this name.
    pub async fn has_session(&self, id: &str) -> std::result::Result<bool, Refusal> {
        let end = row_of("", id);
        Ok(self.db().keys(Table::Sessions).await?.iter().any(|name| name.ends_with(&end)))
    }

    /// The row of a model's session.
    pub async fn session(&self, model: &str, id: &str) -> std::result::Result<Option<Row>, Refusal> {
        let text = self.db().get(Table::Sessions, &row_of(model, id)).await?;
        Ok(text.and_then(|text| Row::read(&text.as_string()?)))
    }

    /// Puts a row with the pages that `before` has not. `false`: the row is not `before` any more, and nothing was put.
    pub async fn put_session(
        &self,
        row: &Row,
        before: Option<&Row>,
        pages: Vec<(String, Vec<u8>)>,
    ) -> std::result::Result<bool, Refusal> {
        let name = row_of(&row.model, &row.id);
        let (text, expected, prefix) = (row.text(), before.map(Row::text), pages_of(&name));
        let stay: HashSet<String> = row.keys().into_iter().collect();
        let put = pages.into_iter().map(|(key, bytes)| (key, Uint8Array::from(&bytes[..]).into())).collect();
        let change = move |now: Option<String>| {
            let Some(old) = now.as_deref().and_then(Row::read) else {
                // None, or a damaged one, of which the pages are not known.
                let delete_all = now.map(|_| prefix);
                return expected.is_none().then_some(Change {
                    text: Some(text),
                    put,
                    delete_all,
                    ..Change::default()
                });
            };
            if Some(old.text()) != expected {
                return None;
            }
            let delete = old.keys().into_iter().filter(|key| !stay.contains(key)).collect();
            Some(Change { text: Some(text), put, delete, delete_all: None })
        };
        self.db().update_with(TABLES, &name, change).await
    }

    /// Deletes a model's session and its pages.
    pub async fn delete_session(&self, model: &str, id: &str) -> std::result::Result<(), Refusal> {
        self.delete_row(&row_of(model, id)).await
    }

    async fn delete_row(&self, name: &str) -> std::result::Result<(), Refusal> {
        let delete_all = Some(pages_of(name));
        let change = |_| Some(Change { delete_all, ..Change::default() });
        self.db().update_with(TABLES, name, change).await.map(drop)
    }

    /// Deletes rows that nobody can read any more, and pages that no row has.
    pub async fn sweep_sessions(&self) -> std::result::Result<(), Refusal> {
        // In this order: a page that is there has its row, or had it.
        let mut pages = self.db().keys(Table::Pages).await?;
        for name in self.db().keys(Table::Sessions).await? {
            let text = self.db().get(Table::Sessions, &name).await?;
            let row = text.and_then(|text| Row::read(&text.as_string()?));
            if row.is_none_or(|row| row_of(&row.model, &row.id) != name) {
                self.delete_row(&name).await?;
            }
            let prefix = pages_of(&name);
            pages.retain(|page| !page.starts_with(&prefix));
        }
        if pages.is_empty() {
            return Ok(());
        }
        self.db().delete(Table::Pages, &pages).await
    }

    /// Deletes all sessions of a model, damaged ones too.
    pub async fn delete_sessions(&self, model: &str) -> std::result::Result<(), Refusal> {
        let begin = row_of(model, "");
        for key in self.db().keys(Table::Sessions).await? {
            if key.starts_with(&begin) {
                self.delete_row(&key).await?;
            }
        }
        Ok(())
    }

    /// Deletes the sessions of all models.
    pub async fn clear_sessions(&self) -> std::result::Result<(), Refusal> {
        for table in TABLES {
            self.db().delete(table, &self.db().keys(table).await?).await?;
        }
        Ok(())
    }

    /// The session of a row, as far as its pages are there and right, and `go_on` says so.
    ///
    /// # Errors
    /// `out_of_memory`, which a page beyond the budget is too.
    pub async fn restore_session(
        &self,
        row: Row,
        budget: Arc<Budget>,
        go_on: impl Fn() -> bool,
    ) -> Result<Session> {
        let mut restoring = Restoring::new(row).within(budget);
        while let Some(key) = restoring.next().filter(|_| go_on()) {
            let found = self.db().get(Table::Pages, &key).await.ok().flatten();
            let Some(bytes) = found.and_then(|bytes: JsValue| bytes.dyn_into::<Uint8Array>().ok()) else {
                break;
            };
            if !restoring.push(&bytes.to_vec())? {
                break;
            }
        }
        Ok(restoring.finish())
    }
}
