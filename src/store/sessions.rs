//! Sessions in the store: a row and the pages that it names, put and deleted in one transaction.

use super::db::{Change, Refusal, Table};
use super::Store;
use crate::error::Result;
use crate::session::Session;
use crate::snapshot::{pages_of, row_of, Restoring, Row};
use js_sys::Uint8Array;
use std::collections::HashSet;
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
        let (text, expected, prefix) = (row.text(), before.map(Row::text), pages_of(&row.model, &row.id));
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
        self.db().update_with(TABLES, &row_of(&row.model, &row.id), change).await
    }

    /// Deletes a model's session and its pages.
    pub async fn delete_session(&self, model: &str, id: &str) -> std::result::Result<(), Refusal> {
        let delete_all = Some(pages_of(model, id));
        let change = |_| Some(Change { delete_all, ..Change::default() });
        self.db().update_with(TABLES, &row_of(model, id), change).await.map(drop)
    }

    /// Deletes all sessions of a model, damaged ones too.
    pub async fn delete_sessions(&self, model: &str) -> std::result::Result<(), Refusal> {
        let begin = row_of(model, "");
        for key in self.db().keys(Table::Sessions).await? {
            if let Some(id) = key.strip_prefix(&begin) {
                self.delete_session(model, id).await?;
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

    /// The session of a row, as far as its pages are there and right.
    ///
    /// # Errors
    /// `out_of_memory`.
    pub async fn restore_session(&self, row: Row) -> Result<Session> {
        let mut restoring = Restoring::new(row);
        while let Some(key) = restoring.next() {
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
