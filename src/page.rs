//! The window's side: what a page remembers between visits, in local storage. Typed preferences, and marks that tell the
//! next visit what this one was doing when it was killed. Here is only the thin layer of exports; what is stored, and how
//! damage is survived, is plain Rust in [`shelf`], [`preferences`] and [`marks`]. Nothing here throws because of the storage.

pub mod marks;
pub mod preferences;
pub mod shelf;

#[cfg(target_arch = "wasm32")]
mod exports {
    use std::cell::RefCell;

    use gloo_storage::{LocalStorage, Storage as _};
    use serde::Serialize;
    use serde_json::Value;
    use serde_wasm_bindgen::Serializer;
    use wasm_bindgen::prelude::*;

    use super::marks::Marks;
    use super::shelf::{Shelf, Storage};

    #[wasm_bindgen(typescript_custom_section)]
    const TYPES: &str = r#"
export interface Preferences {
  /** Layout of the stored object. */
  version: number;
  /** Source of the chosen model; null: none chosen yet. */
  model: string | null;
  tier: "auto" | "simd128" | "relaxed";
  threads: "auto" | number;
  theme: "auto" | "light" | "dark";
  language: "auto" | "en" | "zh";
  /** Tokens. */
  contextLength: number;
  temperature: number;
  systemPrompt: string;
}
/** A value that was marked and not cleared, with the time of the mark (ms since 1970). */
export interface Mark { id: string; at: number; value: unknown }
"#;

    /// The browser's local storage; all operations fail where it is switched off, missing or full.
    struct Local;

    impl Storage for Local {
        fn is_open(&self) -> bool {
            // `raw` throws where the property is refused or null: look first.
            let found = js_sys::Reflect::get(&js_sys::global(), &JsValue::from_str("localStorage"));
            found.is_ok_and(|storage| storage.is_object())
        }

        fn read(&self, key: &str) -> Option<String> {
            self.is_open().then(|| LocalStorage::raw().get_item(key).ok().flatten())?
        }

        fn write(&self, key: &str, text: &str) -> bool {
            self.is_open() && LocalStorage::raw().set_item(key, text).is_ok()
        }

        fn remove(&self, key: &str) -> bool {
            self.is_open() && LocalStorage::raw().remove_item(key).is_ok()
        }

        fn keys(&self) -> Vec<String> {
            if !self.is_open() {
                return Vec::new();
            }
            let storage = LocalStorage::raw();
            (0..storage.length().unwrap_or(0)).filter_map(|i| storage.key(i).ok().flatten()).collect()
        }
    }

    thread_local! {
        static SHELF: RefCell<Shelf<Local>> = RefCell::new(Shelf::new(Local));
    }

    fn with_shelf<T>(work: impl FnOnce(&mut Shelf<Local>) -> T) -> T {
        SHELF.with_borrow_mut(work)
    }

    fn to_js(value: &impl Serialize) -> std::result::Result<JsValue, JsError> {
        Ok(value.serialize(&Serializer::json_compatible())?)
    }

    /// All preferences; what was never set, or is damaged in the storage, has its default.
    #[wasm_bindgen(unchecked_return_type = "Preferences")]
    pub fn preferences() -> std::result::Result<JsValue, JsError> {
        to_js(&with_shelf(|shelf| shelf.preferences()))
    }

    /// Sets one preference and stores them all. Throws an `Error` for an unknown key or a value out of range; then nothing
    /// is changed.
    #[wasm_bindgen]
    pub fn set_preference(
        #[wasm_bindgen(unchecked_param_type = "Exclude<keyof Preferences, \"version\">")] key: &str,
        #[wasm_bindgen(unchecked_param_type = "Preferences[keyof Preferences]")] value: JsValue,
    ) -> std::result::Result<(), JsError> {
        // JSON has no such numbers and would turn them into null, which is a value of its own.
        if let Some(number) = value.as_f64().filter(|number| !number.is_finite()) {
            return Err(JsError::new(&format!("{key} must be finite, found {number}")));
        }
        let value: Value = serde_wasm_bindgen::from_value(value)
            .map_err(|error| JsError::new(&format!("{key} must be plain data: {error}")))?;
        with_shelf(|shelf| shelf.set_preference(key, &value)).map_err(|error| JsError::new(&error.message()))
    }

    /// Forgets all preferences.
    #[wasm_bindgen]
    pub fn reset_preferences() {
        with_shelf(|shelf| shelf.reset_preferences());
    }

    /// Whether everything that was set is in the storage: false in private modes without storage and when it is full. The
    /// values are then kept in memory until the page closes.
    #[wasm_bindgen]
    pub fn saved() -> bool {
        with_shelf(|shelf| shelf.is_saved())
    }

    /// Sets the mark of an id (letters, digits, hyphens). `false` when it is not stored, for whatever reason.
    #[wasm_bindgen]
    pub fn set_mark(id: &str, #[wasm_bindgen(unchecked_param_type = "unknown")] value: JsValue) -> bool {
        let value = serde_wasm_bindgen::from_value::<Value>(value);
        value.is_ok_and(|value| Marks::new(Local).set(id, value, js_sys::Date::now()))
    }

    /// The marks of all tabs, living and dead; those older than a week are dropped.
    #[wasm_bindgen(unchecked_return_type = "Mark[]")]
    pub fn marks() -> std::result::Result<JsValue, JsError> {
        to_js(&Marks::new(Local).all(js_sys::Date::now()))
    }

    /// Takes a mark away, if it is there.
    #[wasm_bindgen]
    pub fn clear_mark(id: &str) {
        Marks::new(Local).clear(id);
    }
}
