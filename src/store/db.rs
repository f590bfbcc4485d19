//! The IndexedDB database `qandle`: texts and bytes under text keys, one transaction each.

use super::browser::{describe, error_name, within};
use js_sys::{Array, Function, Promise, Reflect};
use std::cell::Cell;
use std::rc::Rc;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{
    IdbDatabase, IdbFactory, IdbKeyRange, IdbOpenDbRequest, IdbRequest, IdbTransaction, IdbTransactionMode,
};

/// The database's name.
pub(super) const NAME: &str = "qandle";
/// Each new table raises it.
const VERSION: u32 = 2;
/// A database that another tab holds back, or that a browser never opens, is none.
const OPEN_MS: i32 = 5000;

/// Object stores of the database.
#[derive(Debug, Clone, Copy)]
pub enum Table {
    /// Rows of [`super::manifest::Manifest`], as JSON text, by source.
    Models,
    /// Bytes of chunks, as `Blob`s.
    Chunks,
    /// Rows of [`crate::snapshot::Row`], as JSON text, by session.
    Sessions,
    /// Bytes of the sessions' pages.
    Pages,
    /// The record of token ids.
    Tokens,
}

const TABLES: [Table; 5] = [Table::Models, Table::Chunks, Table::Sessions, Table::Pages, Table::Tokens];

impl Table {
    pub(super) fn name(self) -> &'static str {
        match self {
            Table::Models => "models",
            Table::Chunks => "chunks",
            Table::Sessions => "sessions",
            Table::Pages => "pages",
            Table::Tokens => "tokens",
        }
    }
}

/// What becomes of a text and of what lies beside it.
#[derive(Debug, Default)]
pub struct Change {
    /// The text.
    pub text: Option<String>,
    /// Names and values.
    pub put: Vec<(String, JsValue)>,
    /// Names.
    pub delete: Vec<String>,
    /// What the names begin with that go before anything is put.
    pub delete_all: Option<String>,
}

/// What a store could not do.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// Whether there was no room.
    pub full: bool,
    /// Whether somebody else has it open.
    pub locked: bool,
    /// The browser's words.
    pub message: String,
}

impl From<JsValue> for Refusal {
    fn from(error: JsValue) -> Self {
        let name = error_name(&error);
        let (full, locked) = (name == "QuotaExceededError", name == "NoModificationAllowedError");
        Refusal { full, locked, message: describe(&error) }
    }
}

/// An open database.
#[derive(Debug)]
pub struct Db(IdbDatabase);

impl Db {
    /// Opens it, and makes the tables that it lacks.
    ///
    /// # Errors
    /// Where the browser has no IndexedDB, refuses it, or does not answer.
    pub async fn open() -> Result<Self, Refusal> {
        let factory: IdbFactory = Reflect::get(&js_sys::global(), &"indexedDB".into())?
            .dyn_into()
            .map_err(|_| JsValue::from("there is no IndexedDB"))?;
        let request = factory.open_with_u32(NAME, VERSION)?;
        // It may be called long after nobody waits for it any more. It must not hold the request, which holds it: neither
        // would ever go, nor would the database.
        let upgrade = Closure::once_into_js(|event: JsValue| {
            let request = Reflect::get(&event, &"target".into());
            let db = request.and_then(|request| Reflect::get(&request, &"result".into()));
            let Ok(db) = db.and_then(|db| db.dyn_into::<IdbDatabase>()) else { return };
            for table in TABLES {
                // It fails where the table is there already.
                let _ = db.create_object_store(table.name());
            }
        });
        request.set_onupgradeneeded(Some(upgrade.unchecked_ref()));
        let opened = within(OPEN_MS, opened(&request), "IndexedDB does not open").await?;
        let db: IdbDatabase = opened.dyn_into().map_err(|_| JsValue::from("no database was opened"))?;
        // Another tab with a newer version must not wait for this one.
        let close = Function::new_no_args("this.close()");
        db.set_onversionchange(Some(&close));
        Ok(Self(db))
    }

    /// The value under a key.
    pub async fn get(&self, table: Table, key: &str) -> Result<Option<JsValue>, Refusal> {
        let transaction = self.0.transaction_with_str(table.name())?;
        let request = transaction.object_store(table.name())?.get(&key.into())?;
        let value = result_of(&request).await?;
        Ok((!value.is_undefined()).then_some(value))
    }

    /// All values of a table.
    pub async fn all(&self, table: Table) -> Result<Vec<JsValue>, Refusal> {
        let transaction = self.0.transaction_with_str(table.name())?;
        let request = transaction.object_store(table.name())?.get_all()?;
        Ok(Array::from(&result_of(&request).await?).to_vec())
    }

    /// All keys of a table.
    pub async fn keys(&self, table: Table) -> Result<Vec<String>, Refusal> {
        let transaction = self.0.transaction_with_str(table.name())?;
        let request = transaction.object_store(table.name())?.get_all_keys()?;
        let keys = result_of(&request).await?;
        Ok(Array::from(&keys).iter().filter_map(|key| key.as_string()).collect())
    }

    /// Keeps a value; when this comes back, it is stored.
    pub async fn put(&self, table: Table, key: &str, value: &JsValue) -> Result<(), Refusal> {
        self.write(table, |store| store.put_with_key(value, &key.into()).map(drop)).await
    }

    /// Puts what `change` makes of the value under a key, in one transaction; `None` leaves it. Says whether it was put.
    pub async fn update(
        &self,
        table: Table,
        key: &str,
        change: impl FnOnce(Option<JsValue>) -> Option<JsValue> + 'static,
    ) -> Result<bool, Refusal> {
        let mode = IdbTransactionMode::Readwrite;
        let transaction = self.0.transaction_with_str_and_mode(table.name(), mode)?;
        let store = transaction.object_store(table.name())?;
        let (request, put) = (store.get(&key.into())?, Rc::new(Cell::new(false)));
        // In the event itself: in a build with threads a task goes on only when the transaction is over.
        let found = Closure::once_into_js({
            let (request, put, key) = (request.clone(), put.clone(), JsValue::from(key));
            move || {
                let value = request.result().ok().filter(|value| !value.is_undefined());
                if let Some(value) = change(value) {
                    put.set(store.put_with_key(&value, &key).is_ok());
                }
            }
        });
        request.set_onsuccess(Some(found.unchecked_ref()));
        completed(&transaction).await.map(|()| put.get())
    }

    /// As [`Db::update`], of a text and of what lies beside it in another table: `change` says what the text becomes (`None`:
    /// it goes), and what is put and deleted there.
    pub async fn update_with(
        &self,
        [table, beside]: [Table; 2],
        key: &str,
        change: impl FnOnce(Option<String>) -> Option<Change> + 'static,
    ) -> Result<bool, Refusal> {
        let names: Array = [table.name(), beside.name()].iter().map(|name| JsValue::from(*name)).collect();
        let mode = IdbTransactionMode::Readwrite;
        let transaction = self.0.transaction_with_str_sequence_and_mode(&names, mode)?;
        let (texts, values) =
            (transaction.object_store(table.name())?, transaction.object_store(beside.name())?);
        let (request, done) = (texts.get(&key.into())?, Rc::new(Cell::new(false)));
        let found = Closure::once_into_js({
            let (request, done, key, whole) =
                (request.clone(), done.clone(), JsValue::from(key), transaction.clone());
            move || {
                let Some(change) = change(request.result().ok().and_then(|text| text.as_string())) else {
                    return;
                };
                let made = || {
                    if let Some(prefix) = &change.delete_all {
                        let end = format!("{prefix}\u{ffff}");
                        let range = IdbKeyRange::bound(&prefix.into(), &end.into())?;
                        values.delete(&range)?;
                    }
                    for (name, value) in &change.put {
                        values.put_with_key(value, &name.into())?;
                    }
                    for name in &change.delete {
                        values.delete(&name.into())?;
                    }
                    match &change.text {
                        Some(text) => texts.put_with_key(&text.into(), &key),
                        None => texts.delete(&key),
                    }
                };
                done.set(made().is_ok());
                if !done.get() {
                    // All of it or nothing.
                    let _ = whole.abort();
                }
            }
        });
        request.set_onsuccess(Some(found.unchecked_ref()));
        completed(&transaction).await.map(|()| done.get())
    }

    /// Forgets keys; absent ones are no fault.
    pub async fn delete(&self, table: Table, keys: &[String]) -> Result<(), Refusal> {
        self.write(table, |store| keys.iter().try_for_each(|key| store.delete(&key.into()).map(drop))).await
    }

    async fn write(
        &self,
        table: Table,
        work: impl FnOnce(web_sys::IdbObjectStore) -> Result<(), JsValue>,
    ) -> Result<(), Refusal> {
        let transaction =
            self.0.transaction_with_str_and_mode(table.name(), IdbTransactionMode::Readwrite)?;
        work(transaction.object_store(table.name())?)?;
        completed(&transaction).await
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        self.0.close();
    }
}

async fn result_of(request: &IdbRequest) -> Result<JsValue, JsValue> {
    let promise = Promise::new(&mut |resolve, reject| {
        request.set_onsuccess(Some(&resolve));
        request.set_onerror(Some(&reject));
    });
    match JsFuture::from(promise).await {
        Ok(_) => request.result(),
        Err(_) => Err(match request.error() {
            Ok(Some(error)) => error.into(),
            _ => "the request failed".into(),
        }),
    }
}

async fn opened(request: &IdbOpenDbRequest) -> Result<JsValue, JsValue> {
    result_of(request).await
}

async fn completed(transaction: &IdbTransaction) -> Result<(), Refusal> {
    let promise = Promise::new(&mut |resolve, reject| {
        transaction.set_oncomplete(Some(&resolve));
        transaction.set_onabort(Some(&reject));
    });
    match JsFuture::from(promise).await {
        Ok(_) => Ok(()),
        Err(_) => Err(match transaction.error() {
            Some(error) => JsValue::from(error),
            None => JsValue::from("the transaction was aborted"),
        }
        .into()),
    }
}
