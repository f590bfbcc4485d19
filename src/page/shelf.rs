//! What the page keeps in a key-value storage that may be absent, full, damaged or shared with other tabs. The storage is
//! read anew each time; only what it refused to take is kept in memory, and wins until the storage takes it.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::Value;

use super::preferences::Preferences;
use crate::error::Result;

const PREFERENCES: &str = "qandle.preferences";

/// Text by key, as local storage has it. Every operation may fail and says so.
pub trait Storage {
    /// Whether there is a storage at all.
    fn is_open(&self) -> bool;
    /// The text under `key`.
    fn read(&self, key: &str) -> Option<String>;
    /// Stores `text` under `key`; `false` when it was not stored.
    fn write(&self, key: &str, text: &str) -> bool;
    /// Removes `key`; `false` when that was not possible.
    fn remove(&self, key: &str) -> bool;
    /// All keys that there are, in no order.
    fn keys(&self) -> Vec<String>;
}

/// The preferences over a storage.
#[derive(Debug)]
pub struct Shelf<S> {
    storage: S,
    /// What could not be stored (`None`: not removed).
    kept: HashMap<&'static str, Option<String>>,
}

impl<S: Storage> Shelf<S> {
    /// A shelf that has nothing in memory yet.
    pub fn new(storage: S) -> Self {
        Shelf { storage, kept: HashMap::new() }
    }

    /// The preferences as they are now, with defaults for what is missing or damaged.
    pub fn preferences(&self) -> Preferences {
        self.read(PREFERENCES).map(|text| Preferences::from_stored(&text)).unwrap_or_default()
    }

    /// Sets one preference; see [`Preferences::set`].
    ///
    /// # Errors
    /// `invalid_request` for an unknown key or a value out of range, never because of the storage.
    pub fn set_preference(&mut self, key: &str, value: &Value) -> Result<()> {
        let mut preferences = self.preferences();
        preferences.set(key, value)?;
        self.write(PREFERENCES, &preferences);
        Ok(())
    }

    /// Forgets all preferences.
    pub fn reset_preferences(&mut self) {
        self.remove(PREFERENCES);
    }

    /// Whether the next visit will find everything as it is now.
    pub fn is_saved(&self) -> bool {
        self.kept.is_empty() && self.storage.is_open()
    }

    fn read(&self, key: &'static str) -> Option<String> {
        match self.kept.get(key) {
            Some(kept) => kept.clone(),
            None => self.storage.read(key),
        }
    }

    fn write(&mut self, key: &'static str, value: &impl Serialize) {
        let text = serde_json::to_string(value).expect("plain data with text keys always serializes");
        if self.storage.write(key, &text) {
            self.kept.remove(key);
        } else {
            self.kept.insert(key, Some(text));
        }
    }

    fn remove(&mut self, key: &'static str) {
        if self.storage.remove(key) {
            self.kept.remove(key);
        } else {
            self.kept.insert(key, None);
        }
    }
}

#[cfg(test)]
pub(super) mod fake {
    use super::Storage;
    use std::cell::{Cell, RefCell};
    use std::collections::HashMap;
    use std::rc::Rc;

    /// A storage that can be closed or full, and is shared as local storage is among tabs.
    #[derive(Clone, Default)]
    pub struct Fake {
        pub items: Rc<RefCell<HashMap<String, String>>>,
        pub closed: Rc<Cell<bool>>,
        pub full: Rc<Cell<bool>>,
    }

    impl Storage for Fake {
        fn is_open(&self) -> bool {
            !self.closed.get()
        }
        fn read(&self, key: &str) -> Option<String> {
            self.items.borrow().get(key).filter(|_| self.is_open()).cloned()
        }
        fn write(&self, key: &str, text: &str) -> bool {
            let takes = self.is_open() && !self.full.get();
            if takes {
                self.items.borrow_mut().insert(key.to_string(), text.to_string());
            }
            takes
        }
        fn remove(&self, key: &str) -> bool {
            if self.is_open() {
                self.items.borrow_mut().remove(key);
            }
            self.is_open()
        }
        fn keys(&self) -> Vec<String> {
            self.items.borrow().keys().filter(|_| self.is_open()).cloned().collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use super::fake::Fake;

    fn theme(shelf: &Shelf<Fake>) -> &'static str {
        shelf.preferences().theme
    }

    #[test]
    fn preferences_outlive_the_page_and_reach_other_tabs() {
        let storage = Fake::default();
        let mut tab = Shelf::new(storage.clone());
        let mut other = Shelf::new(storage.clone());
        assert_eq!(tab.preferences(), Preferences::default());
        assert_eq!(tab.set_preference("theme", &json!("dark")), Ok(()));
        assert_eq!(other.set_preference("language", &json!("zh")), Ok(()));
        assert_eq!((tab.preferences().language, theme(&other)), ("zh", "dark"));
        assert_eq!(theme(&Shelf::new(storage.clone())), "dark");
        assert!(tab.is_saved());
        assert!(tab.set_preference("theme", &json!("pink")).is_err());
        assert_eq!(theme(&tab), "dark");
        tab.reset_preferences();
        assert_eq!(other.preferences(), Preferences::default());
    }

    #[test]
    fn a_closed_storage_leaves_the_values_in_memory() {
        let storage = Fake::default();
        storage.closed.set(true);
        let mut shelf = Shelf::new(storage.clone());
        assert!(!shelf.is_saved());
        assert_eq!(shelf.set_preference("theme", &json!("dark")), Ok(()));
        assert_eq!(theme(&shelf), "dark");
        shelf.reset_preferences();
        assert_eq!(theme(&shelf), "auto");
        assert!(!shelf.is_saved());
    }

    #[test]
    fn a_full_storage_keeps_the_new_value_in_memory_until_it_takes_it() {
        let storage = Fake::default();
        let mut shelf = Shelf::new(storage.clone());
        assert_eq!(shelf.set_preference("theme", &json!("light")), Ok(()));
        storage.full.set(true);
        assert_eq!(shelf.set_preference("theme", &json!("dark")), Ok(()));
        assert_eq!((theme(&shelf), shelf.is_saved()), ("dark", false));
        assert_eq!(theme(&Shelf::new(storage.clone())), "light", "what was stored before is whole");
        storage.full.set(false);
        assert_eq!(shelf.set_preference("language", &json!("en")), Ok(()));
        assert!(shelf.is_saved());
        assert_eq!(theme(&Shelf::new(storage)), "dark");
    }

    #[test]
    fn damaged_items_read_as_nothing_and_are_replaced() {
        let storage = Fake::default();
        storage.items.borrow_mut().insert(PREFERENCES.to_string(), "{\"theme\":".to_string());
        let mut shelf = Shelf::new(storage.clone());
        assert_eq!(shelf.preferences(), Preferences::default());
        assert_eq!(shelf.set_preference("theme", &json!("dark")), Ok(()));
        assert_eq!(theme(&Shelf::new(storage)), "dark");
    }
}
